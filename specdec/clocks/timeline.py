"""Pieces of work, written down for a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SPANS = 200_000
"""Spans that a timeline keeps: about 40 MB of trace.json; later ones are only counted."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one rank.

    Attributes:
        rank: whose.
        kind: a value of ``Work``.
        start_s: when it began, on the clock that wrote it down.
        seconds: how long it took on that clock.
        tokens: rows that it was about.
        step: turn of the loop in which it was done.
        work_s: seconds of real work in it; 0 on a virtual clock.
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
        step: turn of the loop that new spans belong to; whoever drives the rank sets it.
        spans: in the order in which they were charged.
        dropped: spans beyond ``MAX_SPANS``.
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
        """Writes a span of the present step down."""
        if len(self.spans) >= MAX_SPANS:
            self.dropped += 1
        else:
            self.spans.append(Span(rank, kind, start_s, seconds, tokens, self.step, work_s))

    def take(self) -> tuple[Span, ...]:
        """Hands the spans over and forgets them."""
        spans = tuple(self.spans)
        self.spans.clear()
        return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReport:
    """What one rank's clock has seen so far; plain values, so that it can cross processes.

    Attributes:
        rank: whose clock.
        origin_s: seconds since the epoch at its time 0, to lay timelines side by side.
        pieces: priced pieces of work.
        overruns: those whose real work took longer than the profile says.
        busy_s: seconds of work, paced or real.
        wait_s: seconds of it that were waited out.
        spans: those since the last report, where a trace was asked for.
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
    def from_json(found: Mapping[str, Any]) -> ClockReport:
        """The inverse of ``dataclasses.asdict``, also after a way through JSON."""
        return ClockReport(**{**found, "spans": tuple(Span(**s) for s in found["spans"])})


@dataclass(slots=True)
class DraftTime:
    """Draft work of the controller, on a clock that knows when the target's ranks are done.

    Attributes:
        total_s: seconds of it.
        hidden_s: those of them in which a rank of the target was at work.
    """

    total_s: float = 0.0
    hidden_s: float = 0.0

    def add(self, *, began_s: float, seconds: float, target_done_s: float) -> None:
        """Counts one piece of draft work; times are on one clock."""
        self.total_s += seconds
        self.hidden_s += min(max(target_done_s - began_s, 0.0), seconds)
