"""Reads run folders, as ``Result`` objects or pandas data frames (docs/results.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pandas import DataFrame

from specdec.errors import UserError
from specdec.files import parse_json, parse_yaml
from specdec.metrics import RequestResult, Run
from specdec.metrics.times import decode_phase
from specdec.report.requests import RequestRecord, read_requests, runs_of
from specdec.report.spec_bench import task_of

CONFIG_FILE, SUMMARY_FILE = "config.yaml", "summary.json"
COMPARISON_FILE, REQUESTS_FILE = "comparison.json", "requests.jsonl"

ENDS_FILE = "token_ends.json"
"""A run folder's file that maps strategy -> prompt id -> ``token_ends`` of the output."""

_SHARED = (
    *("executor", "model", "data", "sampling", "clock", "seed", "batch_size"),
    *("max_new_tokens", "stop_strings", "ignore_eos"),
)
"""A run and its baseline must agree in these configuration keys."""

_COUNTS = ("answers", "accepted", "hits", "misses", "proposed", "verified")

Config = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """Results of one strategy in one folder.

    An interrupted run has records but neither summary nor conditions.

    Attributes:
        name: name of the job within a sweep, otherwise of the strategy.
        strategy: name of the preset.
        config: content of ``config.yaml`` as plain values.
        records: finished prompts in file order.
        summary: metrics of a complete run, or row of a comparison.
        conditions: data, models and environment of the run.
        ends: prompt id -> ``origins.token_ends`` of its output; empty without a tokenizer.
        plain: repeats of plain decoding that it is compared with; may be empty.
    """

    folder: Path
    name: str
    strategy: str
    config: Config
    records: tuple[RequestRecord, ...]
    summary: Mapping[str, Any] | None
    conditions: Mapping[str, Any]
    ends: Mapping[str, Sequence[int]]
    plain: Sequence[Run] = ()

    @property
    def results(self) -> list[RequestResult]:
        """The finished prompts of the first repeat."""
        return [record.result for record in self.records if record.repeat == 0]

    @cached_property
    def runs(self) -> list[Run]:
        return runs_of(self.records)

    @property
    def requests(self) -> list[RequestResult]:
        """The finished prompts of all repeats whose totals are known."""
        return [result for run in self.runs for result in run.results]


def read(folder: str | Path) -> list[Result]:
    """Reads all runs, comparisons and sweeps in a folder and its subfolders.

    Returns one entry per strategy and run folder, ordered by folder; includes interrupted runs.
    """
    base = Path(folder).expanduser()
    if not base.is_dir():
        raise UserError(f"{base} is not a folder: name the output_dir of a run")
    files = (SUMMARY_FILE, COMPARISON_FILE, REQUESTS_FILE)
    folders = [config.parent for config in sorted(base.rglob(CONFIG_FILE))]
    folders = [folder for folder in folders if any((folder / name).is_file() for name in files)]
    if not folders:
        raise UserError(
            f"{base} holds no results: name the output_dir of specdec run, run -m or compare"
        )
    return [
        r for path in folders for r in _read_folder(path, "/".join(path.relative_to(base).parts))
    ]


def baseline_of(result: Result, results: Iterable[Result]) -> Result | None:
    """Finds the ``ar`` result with the same prompts, models, devices, clock and seed.

    A complete comparison's baseline is its own ``ar`` row, whatever the devices.
    """
    compared = "speedup_wall" in (result.summary or {})
    for other in results:
        shared = (other.config.get(k) == result.config.get(k) for k in _SHARED)
        fits = other.folder == result.folder if compared else all(shared)
        if fits and other.strategy == "ar" and other.records:
            return other
    return None


def frame(*folders: str | Path | Result) -> DataFrame:
    """Returns a pandas frame with one row per strategy and run folder.

    Each argument is a folder for ``read``, or a ``Result`` (of ``specdec.compare``).

    Columns: ``folder``, ``name``, ``strategy``, ``complete``; every configuration key as
    ``config.<key>``; every metric of docs/metrics.md by its name. Histograms are mappings.
    Interrupted runs only have the configuration and ``prompts_finished``.
    """
    return DataFrame(
        {
            **_identity(result),
            "complete": result.summary is not None,
            "prompts_finished": len(result.records),
            **_flat(result.config, "config."),
            **{k: v for k, v in (result.summary or {}).items() if k != "conditions"},
        }
        for result in _results(folders)
    )


def prompt_frame(*folders: str | Path | Result) -> DataFrame:
    """Returns a pandas frame with one row per finished prompt and repeat; arguments as ``frame``.

    Columns: ``folder``, ``name``, ``strategy``, ``repeat``, ``prompt``; ``num_prompt``,
    ``new_tokens``, ``finish_reason``, ``text``; ``tokens_per_s`` (decoding), ``ttft_ms``;
    ``acceptance_length`` (tokens decided per answer), ``drafted_share`` (of its tokens that a
    source proposed); the raw counts (``answers``, ``accepted``, ``hits``, ``misses``, ...).
    """
    return DataFrame([{**head, **prompt_metrics(r)} for head, r in _prompts(folders)])


def token_frame(*folders: str | Path | Result) -> DataFrame:
    """Returns a pandas frame with one row per generated token; arguments as ``frame``.

    Columns: ``folder``, ``name``, ``strategy``, ``repeat``, ``prompt``, ``position`` (0 the first
    generated token), ``token``, ``origin`` (index of the source that proposed it, -1 the target),
    ``emitted_s`` (since the prompt was admitted).
    """
    return DataFrame(
        {
            **head,
            "prompt": r.id,
            **{"position": position, "token": token, "origin": origin},
            "emitted_s": at - r.admitted_s,
        }
        for head, r in _prompts(folders)
        for position, (token, origin, at) in enumerate(
            zip(r.output, r.origins, r.emitted_s, strict=True)
        )
    )


def prompt_metrics(result: RequestResult) -> dict[str, Any]:
    """Returns one prompt's columns of ``prompt_frame``; undefined values are None."""
    c, phase, count = result.counters, decode_phase(result), len(result.output)
    return {
        "prompt": result.id,
        "num_prompt": result.num_prompt,
        "new_tokens": count,
        "finish_reason": result.finish_reason,
        "tokens_per_s": phase.tokens / phase.seconds if phase.seconds > 0 else None,
        "ttft_ms": (result.emitted_s[0] - result.admitted_s) * 1e3 if count else None,
        "acceptance_length": (count + c.cut_tokens) / c.answers if c.answers else None,
        "drafted_share": sum(o >= 0 for o in result.origins) / count if count else None,
        **{name: getattr(c, name) for name in _COUNTS},
        "text": result.text,
    }


def drafted_tokens(records: Iterable[RequestRecord]) -> DataFrame:
    """Returns a pandas frame with one row per finished prompt of the first repeat, in their order.

    Columns: ``domain`` (the category in the data set, in Spec-Bench the task, else the data set; ""
    if unknown), ``tokens``, ``drafted`` (tokens that a source proposed).
    """
    rows = [
        (
            task_of(record.category) or record.prompt.rpartition("/")[0],
            len(record.result.origins),
            sum(origin >= 0 for origin in record.result.origins),
        )
        for record in records
        if record.repeat == 0 and record.result.origins
    ]
    return DataFrame(rows, columns=["domain", "tokens", "drafted"])


def _read_folder(folder: Path, name: str) -> list[Result]:
    try:
        config = parse_yaml((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        records = read_requests(folder / REQUESTS_FILE)
        ends = read_object(folder / ENDS_FILE) or {}
        compared = config.get("command") == "compare"
        if compared:
            found = read_object(folder / COMPARISON_FILE) or {}
            configs = config["strategies"]
            summaries = {row["strategy"]: row for row in found.get("rows", ())}
        else:
            found = read_object(folder / SUMMARY_FILE) or {}
            configs = {str(config["strategy"]["name"]): config}
            summaries = dict.fromkeys(configs, found or None)
        return [
            Result(
                folder=folder,
                name="/".join(filter(None, (name, strategy if compared or not name else ""))),
                strategy=strategy,
                config=strategy_config,
                records=tuple(r for r in records if r.strategy == strategy),
                summary=summaries.get(strategy),
                conditions=found.get("conditions", {}),
                ends=ends.get(strategy, {}),
            )
            for strategy, strategy_config in configs.items()
        ]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} cannot be read ({type(error).__name__}: {error}): its files are damaged or"
            " of another version; run it again"
        ) from error


def read_json(path: Path) -> Any:
    """Reads a file; returns None if it does not exist. Damaged files are a UserError."""
    if not path.is_file():
        return None
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): delete it and run it again") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """Like ``read_json``, for files that hold one JSON object."""
    value = read_json(path)
    if isinstance(value, dict) or not path.is_file():
        return value
    raise UserError(f"{path} is damaged (it is no JSON object): delete it and run it again")


def _identity(result: Result) -> dict[str, Any]:
    return {"folder": result.folder.as_posix(), "name": result.name, "strategy": result.strategy}


def _results(sources: Iterable[str | Path | Result]) -> Iterator[Result]:
    for source in sources:
        yield from [source] if isinstance(source, Result) else read(source)


def _prompts(
    folders: Iterable[str | Path | Result],
) -> Iterator[tuple[dict[str, Any], RequestResult]]:
    """Yields each finished request with the first columns of its rows."""
    for result in _results(folders):
        for record in result.records:
            yield _identity(result) | {"repeat": record.repeat}, record.result


def _flat(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, Mapping) and value and key != "costs"
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat
