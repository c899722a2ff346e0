"""Wall clocks: time as it passes, and time stretched to what a latency profile says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter, sleep, time

from specdec.clocks.interface import CONTROLLER, ClockKind, Work
from specdec.clocks.meter import Meter
from specdec.clocks.profile import LatencyProfile
from specdec.clocks.timeline import ClockReport, DraftTime, Timeline


class _Stopwatch:
    """The time of one process, and when the work began that will be charged next."""

    def __init__(self, meter: Meter) -> None:
        self.zero, self.origin_s = perf_counter(), time()
        self._meter = meter
        self._from: float | None = None
        self._planned = False  # whether that is when it begins, whenever it really did
        meter.take_began()

    def now(self) -> float:
        """Seconds since it was made."""
        return perf_counter() - self.zero

    def start(self) -> None:
        """Work begins now."""
        self._meter.take_began()
        self._from, self._planned = self.now(), False

    def plan(self, at: float) -> None:
        """The next work counts from ``at``, or from the end of the work before if that is later."""
        self._from = at if self._from is None else max(self._from, at)
        self._planned = True

    def ended(self, at: float) -> None:
        """Work has ended; what is charged without a new start goes on from ``at``."""
        self._from = at

    def take(self) -> tuple[float, bool]:
        """When the work began, and whether it goes on from what was charged before.

        A plan says when; without one its first metered model call; where no model was called, the
        last start or end.
        """
        called, planned = self._meter.take_began(), self._planned
        self._planned = False
        if called is not None and not planned:
            return called - self.zero, False
        return (self.now(), False) if self._from is None else (self._from, True)


class _WallClock:
    """What the clocks of one process share: they charge one rank and wait for nobody.

    Attributes:
        rank: the rank that this process is.
        timeline: this rank's work, where one was given.
        drafting: see ``Clock``.
    """

    def __init__(self, *, meter: Meter | None, rank: int, timeline: Timeline | None) -> None:
        self.rank = rank
        self.timeline = timeline
        self.drafting = False
        self._meter = Meter() if meter is None else meter
        self._watch = _Stopwatch(self._meter)
        self._busy_s = 0.0

    def start(self, rank: int) -> None:
        """This rank's work begins now."""
        if rank == self.rank:
            self._watch.start()

    def align(self, rank: int, to: int) -> None:
        """Nothing: ranks wait for messages by themselves."""

    def follow(self, rank: int, to: int) -> None:
        """This rank's work begins now: what it waited for has come."""
        self.start(rank)

    def barrier(self, ranks: Sequence[int]) -> None:
        """Nothing: ranks wait for messages by themselves."""

    def busy(self, rank: int) -> bool:
        """False: whoever has messages under way knows better."""
        return False

    def now(self) -> float:
        """Seconds since this clock was made."""
        return self._watch.now()

    def wait_until(self, seconds: float) -> None:
        """Sleeps, which is a declared wait."""
        with self._meter.waiting():
            sleep(max(0.0, seconds - self.now()))

    def report(self) -> ClockReport:
        """What this rank has done so far; spans are handed over and forgotten."""
        timeline = Timeline() if self.timeline is None else self.timeline
        return ClockReport(
            rank=self.rank,
            origin_s=self._watch.origin_s,
            busy_s=self._busy_s,
            spans=timeline.take(),
            dropped=timeline.dropped,
        )


class MeasuredClock(_WallClock):
    """The wall clock of one process.

    Attributes:
        rank, timeline: see ``__init__``.
    """

    kind = ClockKind.MEASURED

    def __init__(
        self,
        *,
        meter: Meter | None = None,
        rank: int = CONTROLLER,
        timeline: Timeline | None = None,
    ) -> None:
        """Starts at 0.

        Args:
            meter: told of waits, and asked when work began; a new one where omitted.
            rank: the rank that this process is; charges of others are ignored.
            timeline: gets this rank's work.
        """
        super().__init__(meter=meter, rank=rank, timeline=timeline)

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Writes down how long the work took; the time itself has passed."""
        if rank != self.rank or num_tokens <= 0:
            return
        (began, _), now = self._watch.take(), self._watch.now()
        self._watch.ended(now)
        self._busy_s += now - began
        if self.timeline is not None:
            self.timeline.add(rank, kind.value, began, now - began, num_tokens, now - began)


class PacedClock(_WallClock):
    """The wall clock, with every piece of this rank's work stretched to what a profile says.

    Real processes, messages and values; each rank waits out the rest of what its work costs in the
    profile, so that devices overlap on few cores as they would on many. The waits are declared to
    the meter: they are no overhead. Work that takes longer than the profile says is an *overrun*;
    a run with more than 2 % of them does not count, and a larger ``scale`` is
    the remedy. What is charged after one start is judged as one piece of work.

    All ranks keep one schedule. What is charged to *other* ranks moves their planned times on, by
    the same calls as on a simulated clock; so the controller ends a step when the profile says that
    the slowest stage has finished, plans the next from the end of the slowest transfer, and a stage
    begins when its rows are due.

    Attributes:
        profile, scale, rank, timeline: see ``__init__``.
        drafted: this rank's draft work, for ``draft_hidden_share``.
    """

    kind = ClockKind.PACED

    def __init__(
        self,
        profile: LatencyProfile,
        *,
        scale: float = 1.0,
        meter: Meter | None = None,
        rank: int = CONTROLLER,
        timeline: Timeline | None = None,
    ) -> None:
        """Starts at 0.

        Args:
            profile: costs of work; what it does not price takes the time that it takes.
            scale: multiplies every cost.
            meter: told of waits, and asked when work began; a new one where omitted.
            rank: the rank that this process is; charges of others are ignored.
            timeline: gets this rank's work.
        """
        super().__init__(meter=meter, rank=rank, timeline=timeline)
        self.profile = profile
        self.scale = scale
        self._late = False  # whether the last piece was an overrun so far
        self._pieces = self._overruns = 0
        self._wait_s = 0.0
        self.drafted = DraftTime()
        self._not_before = 0.0
        self._plans: defaultdict[int, float] = defaultdict(float)  # of other ranks

    def start(self, rank: int) -> None:
        """This rank's work begins now."""
        super().start(rank)
        if rank == self.rank:
            self._late = False

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Waits until the work has taken as long as the profile says, or counts an overrun.

        Of another rank: its planned time moves on; what is not priced ends now.
        """
        if num_tokens <= 0:
            return
        cost = self.profile.ms(kind, num_tokens) * 1e-3 * self.scale
        if rank != self.rank:
            plan = self._plans[rank]
            self._plans[rank] = plan + cost if cost else max(plan, self.now())
            return
        began, goes_on = self._watch.take()
        began = max(began, self._not_before)
        done, due = self._watch.now(), began + cost
        if not cost:  # not priced: it takes the time that it takes
            self._watch.ended(done)
            self._note(kind, num_tokens, began, done, done)
            return
        if goes_on and self._late:  # the piece so far was late; what it is as a whole, see below
            self._overruns -= 1
            self._pieces -= 1
        self._late = done > due
        self._pieces += 1
        self._overruns += self._late
        if not self._late:
            with self._meter.waiting():
                sleep(due - done)
            self._wait_s += due - done
        ended = max(due, done)
        self._watch.ended(due)
        self._note(kind, num_tokens, began, ended, done)

    def align(self, rank: int, to: int) -> None:
        """This rank's next work counts from the planned time of ``to``, or later.

        Another rank's planned time becomes at least that of ``to``; for this rank the present, or
        the time that its own next work counts from, where that is later.
        """
        if rank == self.rank:
            self._not_before = max(self._not_before, self._plans[to])
        else:
            at = max(self.now(), self._not_before) if to == self.rank else self._plans[to]
            self._plans[rank] = max(self._plans[rank], at)

    def follow(self, rank: int, to: int) -> None:
        """This rank's next work counts from the planned time of ``to`` even if it begins later."""
        if rank == self.rank:
            self._watch.plan(self._plans[to])
        else:
            self.align(rank, to)

    def barrier(self, ranks: Sequence[int]) -> None:
        """Sleeps until all planned times are over, which is a declared wait."""
        latest = max(self._plans[rank] for rank in ranks)
        if latest > self.now():
            self.wait_until(latest)
        self._plans.update((rank, self.now()) for rank in ranks)

    def busy(self, rank: int) -> bool:
        """Whether the rank's planned time is not over."""
        return self._plans[rank] > self.now()

    def _note(self, kind: Work, num_tokens: int, began: float, ended: float, done: float) -> None:
        self._busy_s += ended - began
        if self.drafting:
            done_s = max(self._plans.values(), default=0.0)
            self.drafted.add(began_s=began, seconds=ended - began, target_done_s=done_s)
        if self.timeline is not None:
            work_s = max(0.0, done - began)
            self.timeline.add(self.rank, kind.value, began, ended - began, num_tokens, work_s)

    def report(self) -> ClockReport:
        """What this rank has done so far; spans are handed over and forgotten."""
        return replace(
            super().report(), pieces=self._pieces, overruns=self._overruns, wait_s=self._wait_s
        )
