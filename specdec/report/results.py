"""Writes ``requests.jsonl``; reads run folders as objects or pandas frames (docs/results.md)."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, concat
from pydantic import ConfigDict, TypeAdapter

from specdec.errors import UserError
from specdec.files import flatten, parse_json, parse_yaml, plain, read_json
from specdec.metrics import RequestResult, Run, RunTotals
from specdec.metrics.rates import speculative_decoding
from specdec.metrics.times import decode_phase

CONFIG_FILE, SUMMARY_FILE = "config.yaml", "summary.json"
COMPARISON_FILE, REQUESTS_FILE = "comparison.json", "requests.jsonl"

ENDS_FILE = "token_ends.json"  # strategy -> prompt id -> ``token_ends`` of the output

_SHARED = (  # A run and its baseline must agree in these configuration keys
    *("executor", "model", "data", "sampling", "clock", "seed", "batch_size"),
    *("max_new_tokens", "stop_strings", "ignore_eos"),
)
_COUNTS = ("answers", "accepted", "hits", "misses", "proposed", "verified")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    __pydantic_config__ = ConfigDict(extra="forbid")  # of all parts: other keys are damage

    strategy: str  # name of the preset
    repeat: int  # index from 0
    result: RequestResult
    totals: RunTotals | None = None  # of the run during this request; None if requests shared steps
    prompt: str = ""  # name such as "humaneval/3", or ""
    cpu: Mapping[str, Any] | None = None  # see ``runs.cpu_times``; None if not measured
    disturbed: str = ""  # why the times do not count; "" if they do
    category: str = ""  # of the prompt in its data set, or ""


_RECORD, _OWN = TypeAdapter(RequestRecord), [own.name for own in fields(RequestRecord)]


class RequestWriter(AbstractContextManager["RequestWriter"]):
    """Appends finished requests to a file; removes an incomplete last line of a killed process.

    ``records`` maps (strategy, repeat, prompt id) to the records that a resumed run reuses.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        records, length = _read(file)
        self.records = {(r.strategy, r.repeat, r.result.id): r for r in records if r.totals}
        self._stated = {(r.strategy, r.result.id) for r in records}
        self._stream = file.open("a", encoding="utf-8")
        self._stream.truncate(length)

    def write(self, record: RequestRecord) -> None:
        result, totals = record.result, record.totals
        if totals is not None:
            self.records[record.strategy, record.repeat, result.id] = record
        values = _RECORD.dump_python(record, warnings=False)
        line = {name: values[name] for name in ("strategy", "repeat", "prompt")}
        line |= values["result"] | {"emitted_s": [round(t, 7) for t in result.emitted_s]}
        if record.category:
            line["category"] = record.category
        line["totals"] = values["totals"]
        # Counts are the same in every repeat; readers of such objects add them up.
        if totals is not None and (record.strategy, result.id) not in self._stated:
            self._stated.add((record.strategy, result.id))
            line["speculative_decoding"] = speculative_decoding(
                result.counters, whole_tree=totals.whole_tree, each_step=True
            )
        if record.cpu is not None:
            line |= {"cpu": record.cpu, "disturbed": record.disturbed}
        self._stream.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self._stream.flush()

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def read_requests(path: str | Path) -> list[RequestRecord]:
    """Returns the finished requests of a file: the last complete line of each."""
    records, _ = _read(Path(path))
    return list({(r.strategy, r.repeat, r.result.id): r for r in records}.values())


def runs_of(records: Iterable[RequestRecord]) -> list[Run]:
    """Returns a ``Run`` for each repeat of one strategy that has finished prompts."""
    repeats: dict[int, list[RequestRecord]] = {}
    for record in records:
        if record.totals is not None:
            repeats.setdefault(record.repeat, []).append(record)
    return [
        Run(tuple(r.result for r in own), RunTotals.merge(r.totals for r in own if r.totals))
        for _, own in sorted(repeats.items())
    ]


def _read(path: Path) -> tuple[list[RequestRecord], int]:
    """Returns the records of the complete lines, and the size of these lines in bytes."""
    if not path.exists():
        return [], 0
    *lines, _ = path.read_bytes().split(b"\n")  # without a newline the last line is incomplete
    records, length = list[RequestRecord](), 0
    for number, text in enumerate(lines, start=1):
        values = None
        try:
            if text.strip():
                values = parse_json(text)
                values.pop("speculative_decoding", None)  # derived from the counters
                own = {name: values.pop(name) for name in _OWN if name in values}
                records.append(_RECORD.validate_python({**own, "result": values}))
        except (KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
            if values is None and number == len(lines):
                break
            raise UserError(
                f"{str(path)!r} line {number} is damaged; move the file away to start anew"
            ) from error
        length += len(text) + 1
    return records, length


@dataclass(frozen=True)
class Result:
    """Results of one strategy in one folder; without summary and conditions if interrupted."""

    folder: Path
    name: str  # of the job within a sweep, otherwise of the strategy
    strategy: str  # name of the preset
    config: dict[str, Any]  # content of ``config.yaml`` as plain values
    records: tuple[RequestRecord, ...]  # finished prompts in file order
    summary: Mapping[str, Any] | None  # metrics of a complete run, or row of a comparison
    conditions: Mapping[str, Any]  # data, models and environment of the run
    ends: Mapping[str, Sequence[int]] = field(default_factory=dict)  # prompt id -> ``token_ends``
    plain: Sequence[Run] = ()  # repeats of plain decoding that it is compared with

    @property
    def results(self) -> list[RequestResult]:
        return [record.result for record in self.records if record.repeat == 0]

    @cached_property
    def runs(self) -> list[Run]:
        return runs_of(self.records)

    @property
    def requests(self) -> list[RequestResult]:
        return [result for run in self.runs for result in run.results]


def read(folder: str | Path) -> list[Result]:
    """Reads runs, comparisons and sweeps under a folder: an entry per strategy and run folder."""
    base = Path(folder).expanduser()
    if not base.is_dir():
        raise UserError(f"{base} is not a folder: name the output_dir of a run")
    files = (SUMMARY_FILE, COMPARISON_FILE, REQUESTS_FILE)
    folders = [path.parent for path in sorted(base.rglob(CONFIG_FILE), key=_in_number_order)]
    folders = [path for path in folders if any((path / name).is_file() for name in files)]
    if not folders:
        raise UserError(
            f"{base} holds no results: name the output_dir of specdec run, run -m or compare"
        )
    return [result for path in folders for result in _read_folder(path, base)]


def _in_number_order(path: Path) -> list[tuple[int, str]]:
    """Returns a sort key that compares numbers by value, so gamma=2 precedes gamma=16."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part) if at % 2 else 0, part) for at, part in enumerate(parts)]


def swept_values(job: str) -> dict[str, str]:
    """Splits the name of a sweep's job into keys and values, which may have commas."""
    _, *parts = re.split(r"(?:^|,)\+*([\w./@]+)=", job)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def row_name(values: Mapping[str, str]) -> str:
    """Names a job by its swept values: "specpipe, width=8" for a strategy and ``policy.width``."""
    texts = {key: f"{key.rpartition('.')[2]}={value}" for key, value in values.items() if value}
    return ", ".join(values[key] if key == "strategy" else text for key, text in texts.items())


def baseline_of(result: Result, results: Iterable[Result]) -> list[Run]:
    """Returns the runs of ``ar`` in the same comparison, or with equal ``_SHARED`` configuration;
    [] without such a result, or if it has another number of repeats.
    """
    compared = "speedup_wall" in (result.summary or {})
    for other in results:
        shared = (other.config.get(k) == result.config.get(k) for k in _SHARED)
        fits = other.folder == result.folder if compared else all(shared)
        if fits and other.strategy == "ar" and other.records:
            return other.runs if len(other.runs) == len(result.runs) else []
    return []


Source = str | Path | Result  # A folder for ``read``, or a ``Result`` (of ``specdec.compare``)


def frame(*sources: Source) -> DataFrame:
    """Returns a pandas frame with one row per strategy and run folder.

    Columns: ``folder``, ``name``, ``strategy``, ``complete``; every configuration key as
    ``config.<key>``; every metric of docs/metrics.md by its name. Histograms are mappings.
    Interrupted runs only have the configuration and ``prompts_finished``.
    """
    return DataFrame(
        {
            **head,
            "complete": result.summary is not None,
            "prompts_finished": len(result.records),
            **flatten(result.config, "config", whole=["costs"]),
            **{k: v for k, v in (result.summary or {}).items() if k != "conditions"},
        }
        for result, head in _results(sources)
    )


def prompt_frame(*sources: Source) -> DataFrame:
    """Returns a pandas frame with one row per finished prompt and repeat.

    Columns: ``folder``, ``name``, ``strategy``, ``repeat``, ``prompt`` (its id), its text, metrics
    and raw counts; ``acceptance_length``: tokens per answer, including those cut off.
    """
    rows = []
    for result, head in _prompts(sources):
        c, phase, count = result.counters, decode_phase(result), len(result.output)
        row = {
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
        rows.append(head | row)
    return DataFrame(rows)


def token_frame(*sources: Source) -> DataFrame:
    """Returns a pandas frame with one row per generated token.

    Columns: ``folder``, ``name``, ``strategy``, ``repeat``, ``prompt``, ``position`` (0 the first
    generated token), ``token``, ``origin`` (index of the source that proposed it, -1 the target),
    ``emitted_s`` (since the prompt was admitted).
    """
    frames = []
    for result, head in _prompts(sources):
        tokens = {"position": range(len(result.output)), "token": result.output}
        times_s = np.asarray(result.emitted_s) - result.admitted_s
        own = {"prompt": result.id, **tokens, "origin": result.origins, "emitted_s": times_s}
        frames.append(DataFrame(head | own))
    return concat(frames, ignore_index=True) if frames else DataFrame()


def _read_folder(folder: Path, base: Path) -> list[Result]:
    name = "/".join(folder.relative_to(base).parts)
    try:
        config = parse_yaml((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        records = read_requests(folder / REQUESTS_FILE)
        ends = read_json(folder / ENDS_FILE) or {}
        compared = config.get("command") == "compare"
        configs = config["strategies"] if compared else {str(config["strategy"]["name"]): config}
        found = read_json(folder / (COMPARISON_FILE if compared else SUMMARY_FILE)) or {}
        rows = found.get("rows", [found]) if found else []
        summaries = {row["strategy"]: row for row in rows}
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


def _results(sources: Iterable[Source]) -> Iterator[tuple[Result, dict[str, Any]]]:
    for source in sources:
        for r in [source] if isinstance(source, Result) else read(source):
            yield r, {"folder": r.folder.as_posix(), "name": r.name, "strategy": r.strategy}


def _prompts(sources: Iterable[Source]) -> Iterator[tuple[RequestResult, dict[str, Any]]]:
    for result, head in _results(sources):
        for record in result.records:
            yield record.result, head | {"repeat": record.repeat}
