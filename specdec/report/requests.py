"""Writes and reads ``requests.jsonl``, which gets a line for each prompt as it finishes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import parse_json, plain
from specdec.metrics.rates import speculative_decoding
from specdec.metrics.results import RequestResult, Run, RunTotals


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One line of ``requests.jsonl``."""

    strategy: str  # name of the preset
    repeat: int  # index from 0
    result: RequestResult
    totals: RunTotals | None = None  # of the run during this request; None if requests shared steps
    prompt: str = ""  # name such as "humaneval/3", or ""
    cpu: Mapping[str, Any] | None = None  # see ``runs.cpu_times``; None if not measured
    disturbed: str = ""  # why the times do not count; "" if they do
    category: str = ""  # of the prompt in its data set, or ""


class RequestWriter(AbstractContextManager["RequestWriter"]):
    """Appends lines; removes an incomplete last line that a killed process has left.

    ``records`` has the requests with totals, which a resumed run need not decode again, by
    strategy, repeat and prompt id.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens the file, creating it and its folder; UserError if an earlier line is damaged."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        records, length = _read(file)
        self.records = {(r.strategy, r.repeat, r.result.id): r for r in records if r.totals}
        self._stated = {(r.strategy, r.result.id) for r in records}
        self._stream = file.open("a", encoding="utf-8")
        self._stream.truncate(length)

    def write(self, record: RequestRecord) -> None:
        """Appends one finished request and flushes the file."""
        result, totals = record.result, record.totals
        if totals is not None:
            self.records[record.strategy, record.repeat, result.id] = record
        head = {"strategy": record.strategy, "repeat": record.repeat, "prompt": record.prompt}
        line = {**head, **result.to_json()}
        if record.category:
            line["category"] = record.category
        line["totals"] = None if totals is None else asdict(totals)
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
    """Reads the finished requests; returns an empty list if the file does not exist.

    An incomplete last line, left by a killed process, is ignored; any other damaged line is a
    UserError. Of lines of one request, which earlier versions wrote, the last is returned.
    """
    records, _ = _read(Path(path))
    return list({(r.strategy, r.repeat, r.result.id): r for r in records}.values())


def runs_of(records: Iterable[RequestRecord]) -> list[Run]:
    """Returns the repeats with finished prompts of one strategy, for ``metrics.comparison_row``."""
    repeats: dict[int, list[tuple[RequestResult, RunTotals]]] = {}
    for record in records:
        if record.totals is not None:
            repeats.setdefault(record.repeat, []).append((record.result, record.totals))
    return [Run.of(counted) for _, counted in sorted(repeats.items())]


def _read(path: Path) -> tuple[list[RequestRecord], int]:
    """Returns the records of the complete lines, and the size of these lines in bytes."""
    if not path.exists():
        return [], 0
    *lines, _ = path.read_bytes().split(b"\n")  # without a newline the last line is incomplete
    records, length = list[RequestRecord](), 0
    for number, line in enumerate(lines, start=1):
        try:
            values = parse_json(line) if line.strip() else None
        except ValueError as error:
            if number == len(lines):
                break
            raise _damaged(path, number) from error
        try:
            records += [] if values is None else [_record(values)]
        except (KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
            raise _damaged(path, number) from error
        length += len(line) + 1
    return records, length


def _record(line: dict[str, Any]) -> RequestRecord:
    line.pop("speculative_decoding", None)  # derived from the counters
    totals = line.pop("totals")
    own = {k: line.pop(k) for k in ("strategy", "repeat", "prompt")}
    own |= {k: line.pop(k) for k in ("cpu", "disturbed", "category") if k in line}
    totals = None if totals is None else RunTotals.from_json(totals)
    return RequestRecord(result=RequestResult.from_json(line), totals=totals, **own)


def _damaged(path: Path, number: int) -> UserError:
    return UserError(f"{str(path)!r} line {number} is damaged; move the file away to start anew")
