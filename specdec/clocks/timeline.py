"""Spans of work for traces, and the counts that a rank's clock reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SPANS = 200_000
"""Largest number of spans in a timeline (about 40 MB of trace.json); others are only counted."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one rank; times are on the clock that recorded it.

    Attributes:
        step: iteration of the decode loop.
        work_s: seconds of real work; 0 on a virtual clock.
    """

    rank: int
    kind: str
    start_s: float
    seconds: float
    tokens: int
    step: int
    work_s: float = 0.0


@dataclass(slots=True)
class Timeline:
    """The spans of one process.

    Attributes:
        step: iteration of the decode loop for new spans; set by the code that drives the rank.
        dropped: number of spans beyond ``MAX_SPANS``.
    """

    step: int = 0
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0

    def add(
        self,
        rank: int,
        kind: str,
        start_s: float,
        seconds: float,
        tokens: int,
        work_s: float = 0.0,
    ) -> None:
        if len(self.spans) >= MAX_SPANS:
            self.dropped += 1
        else:
            self.spans.append(Span(rank, kind, start_s, seconds, tokens, self.step, work_s))

    def take(self) -> tuple[Span, ...]:
        spans = tuple(self.spans)
        self.spans.clear()
        return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReport:
    """Cumulative counts of one rank's clock, as plain values that can be sent between processes.

    Attributes:
        origin_s: Unix time at the clock's time 0, used to align timelines.
        pieces: number of priced pieces of work.
        overruns: pieces whose real work took longer than their price.
        busy_s: seconds of work, paced or real.
        wait_s: the part of ``busy_s`` spent waiting for the price to elapse.
    """

    rank: int
    origin_s: float
    pieces: int = 0
    overruns: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    spans: tuple[Span, ...] = ()
    dropped: int = 0

    @staticmethod
    def from_json(report: Mapping[str, Any]) -> ClockReport:
        return ClockReport(**{**report, "spans": tuple(Span(**s) for s in report["spans"])})


@dataclass(slots=True)
class DraftTime:
    """Draft work of the controller, compared with the target's times on the same clock.

    Attributes:
        hidden_s: the part of ``total_s`` during which a rank of the target was busy.
    """

    total_s: float = 0.0
    hidden_s: float = 0.0

    def add(self, *, began_s: float, seconds: float, target_done_s: float) -> None:
        """Counts one piece of draft work; the target is idle from ``target_done_s`` on."""
        self.total_s += seconds
        self.hidden_s += min(max(target_done_s - began_s, 0.0), seconds)
