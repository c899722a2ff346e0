"""Writes and reads ``requests.jsonl``, which gets a line for each prompt as it finishes."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import parse_json, plain
from specdec.metrics.contention import CpuTimes
from specdec.metrics.engine_keys import speculative_decoding
from specdec.metrics.results import RequestResult, RunTotals


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One line of ``requests.jsonl``."""

    strategy: str  # name of the preset
    repeat: int  # index from 0
    result: RequestResult
    totals: RunTotals | None = None  # of the run during this request; None if requests shared steps
    prompt: str = ""  # name such as "humaneval/3", or ""
    cpu: CpuTimes | None = None  # None if not measured
    disturbed: str = ""  # why the times do not count; "" if they do
    category: str = ""  # of the prompt in its data set, or ""

    @property
    def key(self) -> tuple[str, int, int]:
        """(strategy, repeat, prompt id), which identifies the request in a resumed run."""
        return self.strategy, self.repeat, self.result.id


class RequestWriter(AbstractContextManager["RequestWriter"]):
    """Appends lines; removes an incomplete last line that a killed process has left."""

    def __init__(self, path: str | Path) -> None:
        """Opens the file, creating it and its folder; UserError if an earlier line is damaged."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines, length = _complete_lines(self.path)
        self._stated = {(line.get("strategy"), line.get("id")) for _, line in lines}
        self._stream = self.path.open("a", encoding="utf-8")
        self._stream.truncate(length)

    def write(
        self,
        strategy: str,
        result: RequestResult,
        *,
        repeat: int = 0,
        totals: RunTotals | None = None,
        prompt: str = "",
        cpu: CpuTimes | None = None,
        disturbed: str = "",
        category: str = "",
    ) -> None:
        """Appends one finished request (see ``RequestRecord``) and flushes the file.

        A request that is measured again is appended again; readers use its last line.
        """
        line = {"strategy": strategy, "repeat": repeat, "prompt": prompt, **result.to_json()}
        if category:
            line["category"] = category
        line["totals"] = None if totals is None else totals.to_json()
        # Counts are the same in every attempt and repeat; readers of such objects add them up.
        if totals is not None and (strategy, result.id) not in self._stated:
            self._stated.add((strategy, result.id))
            line["speculative_decoding"] = speculative_decoding(
                [result.counters], whole_tree=totals.whole_tree, each_step=True
            )
        if cpu is not None:
            line |= {"cpu": cpu.to_json(), "disturbed": disturbed}
        self._stream.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self._stream.flush()

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def read_requests(path: str | Path) -> list[RequestRecord]:
    """Reads the finished requests; returns an empty list if the file does not exist.

    An incomplete last line, left by a killed process, is ignored; any other damaged line is a
    UserError. Of a request that was measured again only the last line is returned.
    """
    records = []
    for number, line in _complete_lines(Path(path))[0]:
        try:
            records.append(_record(line))
        except (KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
            raise _damaged(path, number) from error
    return list({record.key: record for record in records}.values())


def finished(path: str | Path, strategy: str, repeat: int = 0) -> dict[int, RequestRecord]:
    """Maps prompt ids to the records with totals, which a resumed run need not decode again."""
    return {
        record.result.id: record
        for record in read_requests(path)
        if record.key[:2] == (strategy, repeat) and record.totals is not None
    }


def _record(line: dict[str, Any]) -> RequestRecord:
    strategy, repeat, prompt = line.pop("strategy"), line.pop("repeat"), line.pop("prompt")
    totals = line.pop("totals")
    totals = None if totals is None else RunTotals.from_json(totals)
    cpu, disturbed = line.pop("cpu", None), line.pop("disturbed", "")
    category = line.pop("category", "")
    line.pop("speculative_decoding", None)  # derived from the counters
    result = RequestResult.from_json(line)
    times = None if cpu is None else CpuTimes(**cpu)
    return RequestRecord(strategy, repeat, result, totals, prompt, times, disturbed, category)


def _damaged(path: str | Path, number: int) -> UserError:
    return UserError(f"{str(path)!r} line {number} is damaged; move the file away to start anew")


def _complete_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Returns numbers and values of the complete lines, and their size in bytes."""
    if not path.exists():
        return [], 0
    *lines, _ = path.read_bytes().split(b"\n")  # without a newline the last line is incomplete
    values, length = list[tuple[int, dict[str, Any]]](), 0
    for number, line in enumerate(lines, start=1):
        try:
            values += [(number, parse_json(line))] if line.strip() else []
        except ValueError as error:
            if number == len(lines):
                break
            raise _damaged(path, number) from error
        length += len(line) + 1
    return values, length
