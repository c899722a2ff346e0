"""``specdec.compare``: several strategies on the same prompts, with frames of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from specdec.config.comparison import compose_comparison
from specdec.errors import UserError
from specdec.files import plain, write_text
from specdec.pairs import ModelPair
from specdec.report import results
from specdec.report.results import CONFIG_FILE, Result
from specdec.runs.jobs import compare_jobs

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Result of ``compare``; ``print`` shows its table.

    Attributes:
        rows: one per strategy, as in ``comparison.json``: metrics by the names of docs/metrics.md.
        conditions: data, models and environment.
        results: configuration and finished prompts of each strategy.
        table: what ``specdec compare`` prints.
        notes: overrides that do not apply to every row, and notes of the run.
    """

    rows: tuple[Mapping[str, Any], ...]
    conditions: Mapping[str, Any]
    results: tuple[Result, ...]
    table: str
    notes: tuple[str, ...]

    def frame(self) -> DataFrame:
        """One row per strategy; see ``specdec.report.results.frame``."""
        return results.frame(*self.results)

    def prompt_frame(self) -> DataFrame:
        """One row per prompt and repeat; see ``specdec.report.results.prompt_frame``."""
        return results.prompt_frame(*self.results)

    def token_frame(self) -> DataFrame:
        """One row per generated token; see ``specdec.report.results.token_frame``."""
        return results.token_frame(*self.results)

    def __str__(self) -> str:
        return self.table


def compare(
    strategies: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str | Path] = (),
    pair: ModelPair | None = None,
    output_dir: str | Path | None = None,
) -> Compared:
    """Decodes the same prompts with several strategies, as ``specdec compare`` does.

        print(specdec.compare(["ar", "speculative", "best_first"], ["data.limit=2"]))

    Args:
        strategies: presets, in the order of the rows; times are compared with those of ``ar``.
        overrides: as on the command line, ``repeats=`` among them.
        config_dirs: further configuration trees (``--config-dir``).
        pair: models to use; built from ``model=`` if omitted.
        output_dir: a new or empty folder for the result files; None: they are not kept.

    Raises:
        UserError: anything that the command line refuses, and a folder that is not empty.
    """
    if isinstance(strategies, str) or isinstance(overrides, str):
        raise UserError("strategies and overrides are lists, as in compare(['ar', 'suffix'], [])")
    words = [f"strategies=[{','.join(strategies)}]", *overrides]
    comparison = compose_comparison(words, [Path(folder) for folder in config_dirs])
    if output_dir is None:
        output_dir = comparison.output_dir
    configs, notes = [job.config for job in comparison.jobs], _Notes()
    with _folder(output_dir) as folder, redirect_stdout(StringIO()) as printed:
        write_text(folder / CONFIG_FILE, yaml.safe_dump(plain(comparison.config), sort_keys=False))
        found = compare_jobs(configs, folder, comparison.repeats, notes, pair)
        kept = results.read(folder)
    return Compared(
        rows=tuple(found["rows"]),
        conditions=found["conditions"],
        results=tuple(kept),
        table=printed.getvalue(),
        notes=(*comparison.notices, *notes.texts),
    )


class _Notes:
    """Progress that keeps notes and shows nothing."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def phase(self, label: str, total: int | None) -> None:
        """Shows nothing."""

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Keeps the line."""
        self.texts.append(text)


@contextmanager
def _folder(chosen: str | Path | None) -> Iterator[Path]:
    """The folder of the result files; a temporary one for None."""
    if chosen is None:
        with TemporaryDirectory(prefix="specdec-") as name:
            yield Path(name)
        return
    folder = Path(chosen)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"output_dir={folder} exists and is not an empty folder: name a new one")
    yield folder
