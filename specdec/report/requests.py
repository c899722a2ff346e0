"""``requests.jsonl``: one line per finished prompt, appended and flushed as it finishes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from specdec.errors import UserError
from specdec.files import plain
from specdec.metrics.results import RequestResult, RunTotals


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One line.

    Attributes:
        strategy: the row it belongs to.
        repeat: which repeat, from 0.
        result: the finished request.
        totals: the run's totals while it alone was served; None where requests shared steps.
        prompt: the prompt's name ("humaneval/3"), "" where not given.
    """

    strategy: str
    repeat: int
    result: RequestResult
    totals: RunTotals | None = None
    prompt: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        """(strategy, repeat, prompt id): what a resumed run need not do again."""
        return self.strategy, self.repeat, self.result.id


class RequestWriter:
    """Appends lines; a line that an earlier process left unfinished is removed first."""

    def __init__(self, path: str | Path) -> None:
        """Opens the file for appending, making it and its folder as needed.

        Raises:
            UserError: a line other than the last is damaged.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            whole = _whole_length(self.path.read_bytes(), self.path)
            if whole != self.path.stat().st_size:
                os.truncate(self.path, whole)
        self._stream = self.path.open("a", encoding="utf-8")

    def write(
        self,
        strategy: str,
        result: RequestResult,
        *,
        repeat: int = 0,
        totals: RunTotals | None = None,
        prompt: str = "",
    ) -> None:
        """Appends one finished request and hands it to the operating system."""
        line = {
            "strategy": strategy,
            "repeat": repeat,
            "prompt": prompt,
            **result.to_json(),
            "totals": None if totals is None else totals.to_json(),
        }
        self._stream.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def __enter__(self) -> RequestWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_requests(path: str | Path) -> list[RequestRecord]:
    """Reads a file of finished requests; none where there is no file.

    An unfinished last line, left by a process that was killed, is ignored.

    Raises:
        UserError: another line is damaged.
    """
    file = Path(path)
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: _whole_length(data, file)]
    return [_record(json.loads(line)) for line in whole.splitlines() if line.strip()]


def finished(path: str | Path, strategy: str, repeat: int = 0) -> dict[int, RequestRecord]:
    """Prompt id -> what a file has of a strategy and repeat, totals included: not to be done again.

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
    return RequestRecord(
        strategy=strategy,
        repeat=repeat,
        result=RequestResult.from_json(line),
        totals=None if totals is None else RunTotals.from_json(totals),
        prompt=prompt,
    )


def _whole_length(data: bytes, path: Path) -> int:
    """Bytes up to the end of the last complete line."""
    lines = data.split(b"\n")
    length = 0
    for number, line in enumerate(lines, start=1):
        ended = number < len(lines)
        if line.strip():
            try:
                json.loads(line)
            except ValueError as error:
                if number < len(lines) - 1:
                    raise UserError(
                        f"{str(path)!r} line {number} is damaged; move the file away to start anew"
                    ) from error
                return length
            if not ended:  # complete, but its newline is missing: written again on resume
                return length
        length += len(line) + 1
    return min(length, len(data))
