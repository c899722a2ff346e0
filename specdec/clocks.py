"""Time: one interface for wall clocks and virtual ones (DESIGN 6).

Ranks are numbered from 0, the controller (which also runs the draft); pipeline stages are 1 .. N. A
local target shares rank 0 with its draft. Times are seconds; profiles state milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter, sleep
from typing import Protocol

CONTROLLER = 0
"""Rank of the controller."""


class Work(StrEnum):
    """Kinds of work that a latency profile prices."""

    STAGE = "stage"
    DRAFT = "draft"
    HEAD = "head"
    PRUNE = "prune"
    TRANSFER = "transfer"


class Clock(Protocol):
    """All time goes through one clock; executors and sources charge it for their work."""

    measured: bool
    """True where times are what the wall clock says on this hardware."""

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Accounts work on ``num_tokens`` rows to a rank (nothing on a wall clock)."""
        ...

    def align(self, rank: int, to: int) -> None:
        """Makes ``rank`` wait for what ``to`` has done so far (a message from one to the other)."""
        ...

    def barrier(self, ranks: Sequence[int]) -> None:
        """Makes the ranks wait for each other and the controller: the end of a step."""
        ...

    def busy(self, rank: int) -> bool:
        """Whether ``rank`` is still at work from the controller's point of view."""
        ...

    def now(self) -> float:
        """Seconds since the run began, on the controller."""
        ...

    def wait_until(self, seconds: float) -> None:
        """Lets time pass on the controller until ``seconds`` (the next arrival)."""
        ...


class MeasuredClock:
    """The wall clock."""

    measured = True

    def __init__(self) -> None:
        self._start = perf_counter()

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Nothing: the work itself takes the time."""

    def align(self, rank: int, to: int) -> None:
        """Nothing: ranks wait for messages by themselves."""

    def barrier(self, ranks: Sequence[int]) -> None:
        """Nothing: in one process the ranks run one after the other."""

    def busy(self, rank: int) -> bool:
        """False: in one process nothing runs while the controller does."""
        return False

    def now(self) -> float:
        """Seconds since this clock was made."""
        return perf_counter() - self._start

    def wait_until(self, seconds: float) -> None:
        """Sleeps."""
        sleep(max(0.0, seconds - self.now()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """Milliseconds against number of tokens: linear between points, extended by whole blocks.

    Attributes:
        tokens: increasing, from 1 up.
        ms: cost at each.
        block_tokens, block_ms: beyond the last point, each further block of so many tokens (begun
            or full) costs so much more. Without it the last segment's slope goes on.
    """

    tokens: tuple[int, ...]
    ms: tuple[float, ...]
    block_tokens: int = 0
    block_ms: float = 0.0

    def __post_init__(self) -> None:
        ordered = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if len(self.tokens) != len(self.ms) or not self.tokens or not ordered:
            raise ValueError(
                f"cost curve needs increasing tokens with one ms each, got {self.tokens} and"
                f" {self.ms}"
            )

    def __call__(self, num_tokens: int) -> float:
        """Milliseconds for ``num_tokens``; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        last = self.tokens[-1]
        if num_tokens > last and self.block_tokens:
            return self.ms[-1] + self.block_ms * -(-(num_tokens - last) // self.block_tokens)
        if num_tokens <= self.tokens[0] or len(self.tokens) == 1:
            return self.ms[0]
        i = min(bisect_left(self.tokens, num_tokens), len(self.tokens) - 1)
        left, right = self.tokens[i - 1], last if i == len(self.tokens) - 1 else self.tokens[i]
        part = (num_tokens - left) / (right - left)
        return self.ms[i - 1] + part * (self.ms[i] - self.ms[i - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyProfile:
    """What each kind of work costs on a testbed; each figure has its source in the YAML.

    Attributes:
        name: as in ``clock.profile``.
        costs: kind -> curve; a kind that is absent costs nothing.
        note: where the figures come from, and which are assumptions.
    """

    name: str
    costs: Mapping[str, CostCurve] = field(default_factory=dict)
    note: str = ""

    def ms(self, kind: Work, num_tokens: int) -> float:
        """Milliseconds of one piece of work."""
        curve = self.costs.get(kind.value)
        return curve(num_tokens) if curve is not None else 0.0


class SimulatedClock:
    """A virtual clock: each rank has its own time, moved on by what the profile charges.

    Attributes:
        busy_s: rank -> seconds of charged work, for ``bubble_share``.
        events: (rank, kind, start_s, seconds, tokens) per charge when ``trace`` is set.
    """

    measured = False

    def __init__(self, profile: LatencyProfile, *, scale: float = 1.0, trace: bool = False) -> None:
        """Starts at 0.

        Args:
            profile: costs of work.
            scale: multiplies every cost.
            trace: whether to keep ``events``.
        """
        self.profile = profile
        self.scale = scale
        self.trace = trace
        self.busy_s: defaultdict[int, float] = defaultdict(float)
        self.events: list[tuple[int, str, float, float, int]] = []
        self._time: defaultdict[int, float] = defaultdict(float)

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Moves the rank's time on."""
        cost = self.profile.ms(kind, num_tokens) * 1e-3 * self.scale
        if cost:
            if self.trace:
                self.events.append((rank, kind.value, self._time[rank], cost, num_tokens))
            self._time[rank] += cost
            self.busy_s[rank] += cost

    def align(self, rank: int, to: int) -> None:
        """The rank's time becomes at least that of ``to``."""
        self._time[rank] = max(self._time[rank], self._time[to])

    def barrier(self, ranks: Sequence[int]) -> None:
        """All named ranks and the controller go on from the latest of their times."""
        latest = max(self._time[CONTROLLER], *(self._time[r] for r in ranks))
        self._time[CONTROLLER] = latest
        for rank in ranks:
            self._time[rank] = latest

    def busy(self, rank: int) -> bool:
        """Whether the rank's work ends later than the controller's time."""
        return self._time[rank] > self._time[CONTROLLER]

    def now(self) -> float:
        """The controller's time."""
        return self._time[CONTROLLER]

    def wait_until(self, seconds: float) -> None:
        """Moves the controller's time on."""
        self._time[CONTROLLER] = max(self._time[CONTROLLER], seconds)
