"""``requests.jsonl``: one line per finished prompt, appended and flushed as it finishes."""

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
    """One line of ``requests.jsonl``.

    Attributes:
        strategy, repeat: name of the strategy, and index of the repeat from 0.
        result: the finished request.
        totals: the run's totals during this request; None if requests shared steps.
        prompt: name of the prompt ("humaneval/3"), or "".
        cpu: CPU times beside the wall time; None where they are not measured.
        disturbed: why the times do not count; "" if they do.
        category: of the prompt in its data set, or "".
    """

    strategy: str
    repeat: int
    result: RequestResult
    totals: RunTotals | None = None
    prompt: str = ""
    cpu: CpuTimes | None = None
    disturbed: str = ""
    category: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        """(strategy, repeat, prompt id), which identifies the request in a resumed run."""
        return self.strategy, self.repeat, self.result.id


class RequestWriter(AbstractContextManager["RequestWriter"]):
    """Appends lines; removes an incomplete last line left by an earlier process."""

    def __init__(self, path: str | Path) -> None:
        """Opens the file for appending; creates it and its folder if missing.

        Raises:
            UserError: a line other than the last is damaged.
        """
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
    """Reads the finished requests; an empty list if the file does not exist.

    An incomplete last line, left by a killed process, is ignored. Of a request that was measured
    again only the last line is read.

    Raises:
        UserError: another line is damaged.
    """
    records = []
    for number, line in _complete_lines(Path(path))[0]:
        try:
            records.append(_record(line))
        except (KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
            raise _damaged(path, number) from error
    return list({record.key: record for record in records}.values())


def finished(path: str | Path, strategy: str, repeat: int = 0) -> dict[int, RequestRecord]:
    """Prompt id -> record with totals, of one strategy and repeat; a resumed run skips these.

    Raises:
        UserError: a line other than the last is damaged.
    """
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
    """The complete lines' numbers and values, and the bytes up to the end of the last one."""
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
