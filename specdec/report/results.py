"""Reads run folders, as ``Result`` objects or pandas data frames.

from specdec.report import results
frame = results.frame("outputs/sweep")          # one row per strategy and folder: every metric
prompts = results.prompt_frame("outputs/sweep")  # one row per finished prompt
tokens = results.token_frame("outputs/sweep")    # one row per generated token
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specdec.errors import UserError
from specdec.metrics import RequestResult, Run, RunTotals
from specdec.metrics.times import decode_phase
from specdec.report.requests import RequestRecord, read_requests

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIG_FILE, SUMMARY_FILE = "config.yaml", "summary.json"
COMPARISON_FILE, REQUESTS_FILE = "comparison.json", "requests.jsonl"

_SHARED = (
    *("executor", "model", "data", "sampling", "clock", "seed", "batch_size"),
    *("max_new_tokens", "stop_strings", "ignore_eos"),
)
"""Configuration keys in which a run and its baseline must agree."""

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one strategy in one folder.

    Attributes:
        folder: the folder of the run or comparison.
        name: name of the job within a sweep, otherwise of the strategy.
        strategy: name of the preset.
        config: content of ``config.yaml`` as plain values.
        records: finished prompts in file order, also of an interrupted run.
        summary: metrics of a complete run, or row of a comparison; None if interrupted.
        conditions: data, models and environment of the run; empty if interrupted.
    """

    folder: Path
    name: str
    strategy: str
    config: Config
    records: tuple[RequestRecord, ...]
    summary: Mapping[str, Any] | None
    conditions: Mapping[str, Any]

    @property
    def results(self) -> list[RequestResult]:
        """The finished prompts of the first repeat."""
        return [record.result for record in self.records if record.repeat == 0]

    def runs(self) -> list[Run]:
        """Repeats with finished prompts, for ``metrics.comparison_row``."""
        repeats: dict[int, list[RequestRecord]] = {}
        for record in self.records:
            if record.totals is not None:
                repeats.setdefault(record.repeat, []).append(record)
        return [
            Run(
                tuple(record.result for record in records),
                RunTotals.merge([record.totals for record in records if record.totals]),
            )
            for _, records in sorted(repeats.items())
        ]


def read(folder: str | Path) -> list[Result]:
    """Reads all runs, comparisons and sweeps in a folder and its subfolders.

    Returns:
        One entry per strategy and run folder, ordered by folder; includes interrupted runs.

    Raises:
        UserError: there is no run folder, or a file is damaged.
    """
    base = Path(folder).expanduser()
    if not base.is_dir():
        raise UserError(f"{base} is not a folder: name the output_dir of a run")
    folders = sorted(p.parent for p in base.rglob(CONFIG_FILE) if _is_run(p.parent))
    if not folders:
        raise UserError(
            f"{base} holds no results: name the output_dir of specdec run, run -m or compare"
        )
    results = []
    for path in folders:
        name = path.relative_to(base).as_posix()
        results += _read_folder(path, "" if name == "." else name)
    return results


def baseline_of(result: Result, results: Iterable[Result]) -> Result | None:
    """The ``ar`` result with the same prompts, models, devices, clock and seed, if any."""
    for other in results:
        if other.strategy != "ar" or not other.records:
            continue
        if all(other.config.get(k) == result.config.get(k) for k in _SHARED):
            return other
    return None


def frame(*folders: str | Path) -> DataFrame:
    """A pandas frame with one row per strategy and run folder.

    Columns: ``folder``, ``name``, ``strategy``, ``complete``; every configuration key as
    ``config.<key>``; every metric of docs/metrics.md by its name. Histograms are mappings.
    Interrupted runs only have the configuration and ``prompts_finished``.

    Raises:
        UserError: see ``read``.
    """
    rows = []
    for result in _read_all(folders):
        rows.append(
            {
                **_identity(result),
                "complete": result.summary is not None,
                "prompts_finished": len(result.records),
                **{f"config.{key}": value for key, value in _flat(result.config).items()},
                **{k: v for k, v in (result.summary or {}).items() if k != "conditions"},
            }
        )
    return _data_frame(rows)


def prompt_frame(*folders: str | Path) -> DataFrame:
    """A pandas frame with one row per finished prompt and repeat.

    Columns: ``folder``, ``name``, ``strategy``, ``repeat``, ``prompt``; ``num_prompt``,
    ``new_tokens``, ``finish_reason``, ``text``; ``tokens_per_s`` (decoding), ``ttft_ms``;
    ``acceptance_length`` (tokens decided per answer), ``drafted_share`` (of its tokens that a
    source proposed); the raw counts (``answers``, ``accepted``, ``hits``, ``misses``, ...).

    Raises:
        UserError: see ``read``.
    """
    rows = [
        {**_identity(result), "repeat": record.repeat, **prompt_metrics(record.result)}
        for result in _read_all(folders)
        for record in result.records
    ]
    return _data_frame(rows)


def token_frame(*folders: str | Path) -> DataFrame:
    """A pandas frame with one row per generated token of every prompt and repeat.

    Columns: ``folder``, ``name``, ``strategy``, ``repeat``, ``prompt``, ``position`` (0 the first
    generated token), ``token``, ``origin`` (index of the source that proposed it, -1 the target),
    ``emitted_s`` (since the prompt was admitted).

    Raises:
        UserError: see ``read``.
    """
    rows = []
    for result in _read_all(folders):
        for record in result.records:
            r = record.result
            head = {**_identity(result), "repeat": record.repeat, "prompt": r.id}
            lines = zip(r.output, r.origins, r.emitted_s, strict=True)
            for position, (token, origin, at) in enumerate(lines):
                since = at - r.admitted_s
                rows.append(
                    head
                    | {"position": position, "token": token, "origin": origin, "emitted_s": since}
                )
    return _data_frame(rows)


def prompt_metrics(result: RequestResult) -> dict[str, Any]:
    """One prompt's metrics; undefined ones are None. See ``prompt_frame``."""
    c, phase, count = result.counters, decode_phase(result), len(result.output)
    first = result.emitted_s[0] - result.admitted_s if result.emitted_s else None
    return {
        "prompt": result.id,
        "num_prompt": result.num_prompt,
        "new_tokens": count,
        "finish_reason": result.finish_reason,
        "tokens_per_s": phase.tokens / phase.seconds if phase.seconds > 0 else None,
        "ttft_ms": None if first is None else first * 1e3,
        "acceptance_length": (count + c.cut_tokens) / c.answers if c.answers else None,
        "drafted_share": sum(o >= 0 for o in result.origins) / count if count else None,
        **{
            name: getattr(c, name)
            for name in ("answers", "accepted", "hits", "misses", "proposed", "verified")
        },
        "text": result.text,
    }


def _read_all(folders: Iterable[str | Path]) -> list[Result]:
    return [result for folder in folders for result in read(folder)]


def _is_run(folder: Path) -> bool:
    names = (SUMMARY_FILE, COMPARISON_FILE, REQUESTS_FILE)
    return any((folder / name).is_file() for name in names)


def _read_folder(folder: Path, name: str) -> list[Result]:
    try:
        config = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        records = read_requests(folder / REQUESTS_FILE)
        summary = read_json(folder / SUMMARY_FILE)
        comparison = read_json(folder / COMPARISON_FILE)
        if config.get("command") == "compare":
            return _comparison(folder, name, config, records, comparison or {})
        strategy = str(config["strategy"]["name"])
        conditions = (summary or {}).get("conditions", {})
        name = name or strategy
        return [Result(folder, name, strategy, config, tuple(records), summary, conditions)]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"{folder} cannot be read ({type(error).__name__}: {error}): its files are damaged or"
            " of another version; run it again"
        ) from error


def _comparison(
    folder: Path,
    name: str,
    config: Config,
    records: list[RequestRecord],
    comparison: Mapping[str, Any],
) -> list[Result]:
    rows = {row["strategy"]: row for row in comparison.get("rows", ())}
    return [
        Result(
            folder=folder,
            name=f"{name}/{strategy}" if name else strategy,
            strategy=strategy,
            config=strategy_config,
            records=tuple(r for r in records if r.strategy == strategy),
            summary=rows.get(strategy),
            conditions=comparison.get("conditions", {}),
        )
        for strategy, strategy_config in config["strategies"].items()
    ]


def read_json(path: Path) -> Any:
    """The value of a file; None if it does not exist.

    Raises:
        UserError: it is not JSON.
    """
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): run it again") from error


def _identity(result: Result) -> dict[str, Any]:
    folder = result.folder.as_posix()
    return {"folder": folder, "name": result.name, "strategy": result.strategy}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value and key != "costs":
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _data_frame(rows: list[dict[str, Any]]) -> DataFrame:
    # Imported here because objects and reports do not need pandas.
    import pandas as pd

    return pd.DataFrame(rows)
