"""Spans of work for a trace, and what a rank's clock reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SPANS = 200_000
"""Spans kept by a timeline (about 40 MB of trace.json); further ones are only counted."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one rank.

    Attributes:
        rank: rank that did the work.
        kind: a value of ``Work``.
        start_s: start, on the clock that recorded the span.
        seconds: duration on that clock.
        tokens: number of rows.
        step: turn of the loop.
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
        step: turn of the loop of new spans; set by the code that drives the rank.
        spans: in the order of their charges.
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
        """Records a span of the present step; arguments as in ``Span``."""
        if len(self.spans) >= MAX_SPANS:
            self.dropped += 1
        else:
            self.spans.append(Span(rank, kind, start_s, seconds, tokens, self.step, work_s))

    def take(self) -> tuple[Span, ...]:
        """Returns the spans and removes them."""
        spans = tuple(self.spans)
        self.spans.clear()
        return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReport:
    """Cumulative counts of one rank's clock; plain values, which can be sent between processes.

    Attributes:
        rank: the clock's rank.
        origin_s: seconds since the epoch at its time 0, to align timelines.
        pieces: priced pieces of work.
        overruns: pieces whose real work took longer than their price.
        busy_s: seconds of work, paced or real.
        wait_s: the part of ``busy_s`` spent waiting for the price to elapse.
        spans: spans since the last report of a traced run.
        dropped: spans that were only counted.
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
        """The inverse of ``dataclasses.asdict``, also after a conversion to JSON and back."""
        return ClockReport(**{**report, "spans": tuple(Span(**s) for s in report["spans"])})


@dataclass(slots=True)
class DraftTime:
    """Draft work of the controller, on a clock with the times of the target's ranks.

    Attributes:
        total_s: seconds of draft work.
        hidden_s: the part of it during which a rank of the target was busy.
    """

    total_s: float = 0.0
    hidden_s: float = 0.0

    def add(self, *, began_s: float, seconds: float, target_done_s: float) -> None:
        """Counts one piece of draft work; all times are on one clock."""
        self.total_s += seconds
        self.hidden_s += min(max(target_done_s - began_s, 0.0), seconds)
