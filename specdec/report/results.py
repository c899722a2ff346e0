"""Reads run folders back: objects of our own classes, or pandas frames.

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
"""What a run and the plain decoding that it is held against have in common."""

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What one strategy has left in one folder.

    Attributes:
        folder: the run folder, or the comparison's.
        name: the job's name within a sweep, else the strategy's.
        strategy: the preset's name.
        config: plain values, as in ``config.yaml``.
        records: finished prompts, in the order of the file; also of a run that was interrupted.
        summary: every metric of a complete run (for a comparison its row); None where interrupted.
        conditions: what was decoded, where and how; empty where interrupted.
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
        """Repeats that have finished prompts, as ``metrics.comparison_row`` takes them."""
        repeats: dict[int, list[RequestRecord]] = {}
        for record in self.records:
            if record.totals is not None:
                repeats.setdefault(record.repeat, []).append(record)
        return [
            Run(
                tuple(record.result for record in found),
                RunTotals.merge([record.totals for record in found if record.totals]),
            )
            for _, found in sorted(repeats.items())
        ]


def read(folder: str | Path) -> list[Result]:
    """Everything below a folder: a run's, a comparison's, a sweep's, or one that holds such.

    Returns:
        One entry per strategy and run folder, by folder; interrupted runs included.

    Raises:
        UserError: there is no run folder, or a file of one is damaged.
    """
    base = Path(folder).expanduser()
    if not base.is_dir():
        raise UserError(f"{base} is not a folder: name the output_dir of a run")
    places = sorted(p.parent for p in base.rglob(CONFIG_FILE) if _is_run(p.parent))
    if not places:
        raise UserError(
            f"{base} holds no results: name the output_dir of specdec run, run -m or compare"
        )
    found = []
    for place in places:
        inside = place.relative_to(base).as_posix()
        found += _read_folder(place, "" if inside == "." else inside)
    return found


def partner(result: Result, among: Iterable[Result]) -> Result | None:
    """The plain decoding (``ar``) of the same prompts, models, devices, clock and seed, if any."""
    for other in among:
        if other.strategy != "ar" or not other.records:
            continue
        if all(other.config.get(k) == result.config.get(k) for k in _SHARED):
            return other
    return None


def frame(*folders: str | Path) -> DataFrame:
    """A pandas frame with one row per strategy and run folder.

    Columns: ``folder``, ``name``, ``strategy``, ``complete``; every configuration key as
    ``config.<key>``; every metric of docs/metrics.md by its name. Histograms and other mappings
    stay mappings. Interrupted runs have the configuration and ``prompts_finished`` only.

    Raises:
        UserError: see ``read``.
    """
    rows = []
    for result in _read_all(folders):
        rows.append(
            {
                **_where(result),
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
        {**_where(result), "repeat": record.repeat, **prompt_metrics(record.result)}
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
            head = {**_where(result), "repeat": record.repeat, "prompt": r.id}
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


def _read_folder(folder: Path, inside: str) -> list[Result]:
    try:
        config = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        records = read_requests(folder / REQUESTS_FILE)
        summary = _json(folder / SUMMARY_FILE)
        comparison = _json(folder / COMPARISON_FILE)
        if config.get("command") == "compare":
            return _comparison(folder, inside, config, records, comparison or {})
        strategy = str(config["strategy"]["name"])
        conditions = (summary or {}).get("conditions", {})
        name = inside or strategy
        return [Result(folder, name, strategy, config, tuple(records), summary, conditions)]
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"{folder} cannot be read ({type(error).__name__}: {error}): its files are damaged or"
            " of another version; run it again"
        ) from error


def _comparison(
    folder: Path,
    inside: str,
    config: Config,
    records: list[RequestRecord],
    comparison: Mapping[str, Any],
) -> list[Result]:
    rows = {row["strategy"]: row for row in comparison.get("rows", ())}
    return [
        Result(
            folder=folder,
            name=f"{inside}/{strategy}" if inside else strategy,
            strategy=strategy,
            config=own,
            records=tuple(r for r in records if r.strategy == strategy),
            summary=rows.get(strategy),
            conditions=comparison.get("conditions", {}),
        )
        for strategy, own in config["strategies"].items()
    ]


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _where(result: Result) -> dict[str, Any]:
    where = result.folder.as_posix()
    return {"folder": where, "name": result.name, "strategy": result.strategy}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value and key != "costs":
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _data_frame(rows: list[dict[str, Any]]) -> DataFrame:
    # Here, not at the top: reading results as objects, and reports, do without it.
    import pandas as pd

    return pd.DataFrame(rows)
