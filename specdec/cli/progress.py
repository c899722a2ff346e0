"""Shows progress as a bar on a terminal and as a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from specdec.runs import jobs  # torch comes with it

_LINE_EVERY_S = 10.0


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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as progress:
        yield _Bars(progress)
