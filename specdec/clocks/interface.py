"""The base class of clocks.

Rank 0 is the controller, which also runs the draft; pipeline stages are ranks 1 to N. A local
target shares rank 0 with its draft. Times are in seconds; latency profiles are in milliseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specdec.clocks.profile import LatencyProfile, Work

MAX_SPANS = 200_000
"""Largest number of spans in a timeline (about 40 MB of trace.json); more are only counted."""
CONTROLLER = 0


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one rank; times are on the clock that recorded it.

    Attributes:
        kind: a value of ``Work``, such as "stage".
        tokens: number of rows (tree nodes and prompt tokens) of the work.
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
        pieces: number of pieces of work that have a cost in the latency profile.
        overruns: number of pieces whose real work took longer than their cost.
        busy_s: seconds of work, paced or real.
        wait_s: the part of ``busy_s`` spent waiting for the cost to elapse.
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
    """Time of the controller's draft work; during ``hidden_s`` of it, the target was busy."""

    total_s: float = 0.0
    hidden_s: float = 0.0

    def add(self, *, began_s: float, seconds: float, target_done_s: float) -> None:
        """Adds one piece of draft work; the target was busy until ``target_done_s``."""
        self.total_s += seconds
        self.hidden_s += min(max(target_done_s - began_s, 0.0), seconds)


class ClockKind(StrEnum):
    """How a clock obtains its times.

    ``MEASURED``: wall time on this hardware. ``PACED``: wall time, with each piece of work
    stretched to its cost in a latency profile. ``SIMULATED``: virtual time.
    """

    MEASURED = "measured"
    PACED = "paced"
    SIMULATED = "simulated"


class Clock(ABC):
    """Source of all times. Executors and sources *charge* it: they report each piece of work.

    Where ranks are processes, each has its own clock. Work is charged in three steps: ``start``,
    the work, ``charge``. A simulated clock has the times of all ranks, and may be charged before
    the work.
    """

    kind: ClockKind
    """How the clock obtains its times. It must be a class attribute, to be known in advance."""
    timeline: Timeline | None = None
    """Receives one span per piece of work; None unless the run is traced."""
    drafting: bool = False
    """Whether a token source is running; work charged to the controller is then draft work."""
    profile: LatencyProfile | None = None
    """Latency profile with the costs of work, for policies that adapt to them; or None."""
    busy_s: Mapping[int, float] | None = None
    """Rank -> seconds of charged work, for the metric ``bubble_share``; simulated clocks only."""
    drafted: DraftTime | None = None
    """Time of draft work, for the metric ``draft_hidden_share``; None if it is not recorded."""
    _acting: int | None = None
    """Rank that is charged for the controller's work inside ``on``. A clock that computes times
    must read it in ``charge`` or override ``on``; measured clocks ignore it."""

    @abstractmethod
    def start(self, rank: int) -> None:
        """Marks the start of work on the rank. On a wall clock, the first model call after this, if
        any, counts as the start instead.
        """

    @abstractmethod
    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Accounts for the time of the rank's work on ``num_tokens`` rows.

        On a wall clock the work began with ``start`` or the rank's last charge, and ends now.
        """

    @abstractmethod
    def align(self, rank: int, to: int) -> None:
        """Delays the rank's next work until the work charged to ``to`` has ended."""

    def follow(self, rank: int, to: int) -> None:
        """Delays the rank's next work until the work charged to ``to`` has ended. A paced clock
        counts that work from the planned time, even if the process wakes up later.
        """
        self.align(rank, to)

    @abstractmethod
    def barrier(self, ranks: Sequence[int]) -> None:
        """Makes the controller wait for the ranks, and the ranks for each other."""

    @abstractmethod
    def busy(self, rank: int) -> bool:
        """Returns whether the work of ``rank`` ends later than the controller's current time."""

    @abstractmethod
    def ends_s(self, rank: int) -> float | None:
        """Returns when the work charged to ``rank`` ends; None if that is not known in advance."""

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Makes charges of the controller inside the block count as work of ``rank``, which begins
        now, or when that rank's earlier work ends. Measured clocks ignore this.
        """
        self.align(rank, CONTROLLER)
        self._acting = rank
        try:
            yield
        finally:
            self._acting = None

    @abstractmethod
    def now(self) -> float:
        """Returns the controller's time in seconds since the run began."""

    @abstractmethod
    def wait_until(self, seconds: float) -> None:
        """Advances the controller's time to ``seconds``, for example to the next arrival."""


class WallClock(Clock):
    """The clock of one process, in real time; ``executor.transport=distributed`` requires one."""

    @abstractmethod
    def report(self) -> ClockReport:
        """Returns the cumulative counts of this rank; each span is returned only once."""
