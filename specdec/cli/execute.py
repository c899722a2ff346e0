from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn

from specdec.cli.arguments import Arguments
from specdec.cli.loggers import check_logger, log_results
from specdec.config import folders
from specdec.config.hydra import compose_raw, without_hydra
from specdec.config.job import COMPARISON_FILE, Comparison, Job
from specdec.errors import UserError
from specdec.files import parse_json

if TYPE_CHECKING:
    from specdec.runs import jobs  # torch comes with it

_T = TypeVar("_T")

RESULT_FILE = "summary.json"
"""This file is written last in a run folder: if it exists, the run is complete."""


def execute(work: Job | Comparison, folder: Path) -> Mapping[str, Any] | None:
    """Runs a job or a comparison in its folder, and sends its rows to the logger.

    Returns its results; None if it was complete already.
    """
    from specdec.runs.jobs import compare_jobs, run_job  # torch takes seconds to import

    if isinstance(work, Job):
        configs, result, table = [work.config], RESULT_FILE, ""
        do: Callable[[Any], Mapping[str, Any]] = partial(run_job, work.config, folder)
    else:
        configs = [job.config for job in work.jobs]
        result, table = COMPARISON_FILE, "comparison.md"
        do = partial(compare_jobs, configs, folder, work.repeats)
    check_logger(configs[0], folder)
    done = run_in(folder, work.config, result, do, table=table)
    stored = parse_json((folder / result).read_bytes()) if done is None else done
    log_results(configs, [stored] if isinstance(work, Job) else stored["rows"], folder)
    if done is not None:
        print(f"results in {folder}")
    return done


def run_in(
    folder: Path,
    config: Mapping[str, Any],
    result: str,
    work: Callable[[Any], _T],
    *,
    table: str = "",
) -> _T | None:
    """Does work in its folder as ``specdec.config.folders.run_in`` does, and shows its progress.

    Args:
        work: called with the ``specdec.runs.jobs.Progress`` to report to.
        table: file that is printed if the work is complete already.
    """

    def shown() -> _T:
        with reporting() as progress:
            return work(progress)

    done = folders.run_in(folder, config, result, shown)
    if done is None:
        if table and (folder / table).is_file():
            print((folder / table).read_text(encoding="utf-8"))
        print(f"{folder}: complete already, not run again (delete the folder to repeat it)")
    return done


def print_notices(notices: Iterable[str]) -> None:
    """Prints warnings to standard error, each once."""
    for notice in dict.fromkeys(notices):
        print(f"note: {notice}", file=sys.stderr)


_LINE_EVERY_S = 10.0


def show_config(
    arguments: Arguments,
    make: Callable[[Sequence[str], Sequence[Path]], Mapping[str, Any]],
    jobs: Sequence[Sequence[str]] | None = None,
    *,
    name: str,
) -> int:
    """Prints the configuration of every job as a YAML document; returns exit status 0.

    ``--cfg job`` prints the checked configuration. If that is invalid, it prints the composed one,
    and the error on standard error. ``--cfg hydra`` prints Hydra's own node, ``--cfg all`` both.

    Args:
        make: (overrides, trees) -> the checked configuration; may raise ``UserError``.
        jobs: overrides of each job of a sweep; None for a single job.
    """
    for overrides in [arguments.overrides] if jobs is None else jobs:
        if jobs is not None:
            print(f"---\n# {' '.join(overrides)}")
        refused = None
        if arguments.cfg == "job":
            try:
                config = make(without_hydra(overrides), arguments.config_dirs)
                print(folders.as_yaml(config), end="")
                continue
            except UserError as error:
                refused = f"this configuration cannot be run: {error}"
        raw = compose_raw(overrides, name=name, extra=arguments.config_dirs)
        print_notices([refused] if refused else [])
        wanted = {"job": [False], "hydra": [True], "all": [False, True]}[arguments.cfg]
        keys = [str(key) for key in raw if (key == "hydra") in wanted]
        print(OmegaConf.to_yaml(OmegaConf.masked_copy(raw, keys)), end="")
    return 0


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def phase(self, label: str, total: int | None = None) -> None:
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(label, total=total, detail="")

    def advance(self, count: int = 1, detail: str = "") -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=count, detail=detail)

    def note(self, text: str) -> None:
        self._progress.stop()  # the bars are on standard error, the text goes to standard output
        print(text, flush=True)
        self._progress.start()


class _Lines:
    """Writes a line per phase, and one every ``_LINE_EVERY_S`` seconds."""

    def __init__(self) -> None:
        self._label = ""
        self._total: int | None = None
        self._done = 0
        self._began = self._last = 0.0

    def phase(self, label: str, total: int | None = None) -> None:
        self._label, self._total, self._done = label, total, 0
        self._began = self._last = monotonic()
        self._write("")

    def advance(self, count: int = 1, detail: str = "") -> None:
        self._done += count
        if self._done == self._total or monotonic() - self._last >= _LINE_EVERY_S:
            self._last = monotonic()
            self._write(detail)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def _write(self, detail: str) -> None:
        of = "" if self._total is None else f" {self._done}/{self._total}"
        left = ""
        if self._total and 0 < self._done < self._total:
            seconds = (monotonic() - self._began) / self._done * (self._total - self._done)
            left = f", about {_duration(seconds)} left"
        print(f"{self._label}{of} {detail}".rstrip() + left, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """Formats a duration, as 40 s, 12 min or 3 h 20 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def reporting() -> Iterator[jobs.Progress]:
    """Shows progress on standard error; notes go to standard output."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    counts = MofNCompleteColumn(), TextColumn("{task.fields[detail]}")
    columns = (*Progress.get_default_columns(), *counts)  # text, bar, share, time left
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as progress:
        yield _Bars(progress)
