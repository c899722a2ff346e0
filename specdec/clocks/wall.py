from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter, sleep, time

from specdec.clocks.interface import (
    CONTROLLER,
    ClockKind,
    ClockReport,
    DraftTime,
    Timeline,
    WallClock,
)
from specdec.clocks.meter import Meter
from specdec.clocks.profile import LatencyProfile, Prices, Work


class MeasuredClock(WallClock):
    """The wall clock of one process. It times the rank of that process only; ranks synchronise by
    waiting for messages.
    """

    kind = ClockKind.MEASURED

    def __init__(
        self,
        *,
        meter: Meter | None = None,
        rank: int = CONTROLLER,
        timeline: Timeline | None = None,
    ) -> None:
        """``meter`` records when model calls begin, and counts waits. Work charged to ranks other
        than ``rank`` is ignored.
        """
        self.rank = rank
        self.timeline = timeline
        self._meter = Meter() if meter is None else meter
        self._meter.take_began()
        self._zero, self._origin_s = perf_counter(), time()
        self._start: float | None = None
        self._planned = False  # whether _start is the schedule's time, whatever the real start
        self._busy_s = 0.0

    def start(self, rank: int) -> None:
        if rank == self.rank:
            self._meter.take_began()
            self._start, self._planned = self.now(), False

    def _take_start(self) -> tuple[float, bool]:
        """Returns when the work to charge began (the planned start, else the first metered model
        call, else the last ``start`` or charge), and whether it continues the work charged before.
        """
        called, planned = self._meter.take_began(), self._planned
        self._planned = False
        if called is not None and not planned:
            return called - self._zero, False
        return (self.now(), False) if self._start is None else (self._start, True)

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        if rank != self.rank or num_tokens <= 0:
            return
        (began, _), now = self._take_start(), self.now()
        self._start = now
        self._busy_s += now - began
        if self.timeline is not None:
            self.timeline.add(rank, kind.value, began, now - began, num_tokens, now - began)

    def align(self, rank: int, to: int) -> None:
        """Does nothing, because processes wait for each other's messages in real time."""

    def follow(self, rank: int, to: int) -> None:
        self.start(rank)

    def barrier(self, ranks: Sequence[int]) -> None:
        """Does nothing, because processes wait for each other's messages in real time."""

    def busy(self, rank: int) -> bool:
        return False

    def ends_s(self, rank: int) -> float | None:
        return None

    def now(self) -> float:
        return perf_counter() - self._zero

    def wait_until(self, seconds: float) -> None:
        with self._meter.waiting():
            sleep(max(0.0, seconds - self.now()))

    def skip(self, seconds: float) -> None:
        self._zero += seconds

    def report(self) -> ClockReport:
        timeline = Timeline() if self.timeline is None else self.timeline
        return ClockReport(
            rank=self.rank,
            origin_s=self._origin_s,
            busy_s=self._busy_s,
            spans=timeline.take(),
            dropped=timeline.dropped,
        )


class PacedClock(MeasuredClock):
    """A wall clock that stretches each piece of this rank's work to its latency profile's cost.

    Processes, messages and values are real; each rank waits for the rest of its work's cost, so
    that devices overlap on few cores as they would on many. These waits are declared to the meter
    and do not count as overhead. Work that takes longer than its cost is an *overrun*; a run with
    more than 2 % overruns is not valid, and a larger ``scale`` is the remedy. Everything charged
    after one ``start`` counts as one piece of work.

    All ranks follow one schedule. Charges of *other* ranks advance the times planned for them, by
    the same calls as on a simulated clock: a step ends at the planned end of its slowest stage, the
    next is planned from the slowest transfer's end, a stage begins at its rows' planned arrival.
    """

    kind = ClockKind.PACED
    profile: LatencyProfile
    drafted: DraftTime

    def __init__(
        self,
        profile: LatencyProfile,
        *,
        scale: float = 1.0,
        meter: Meter | None = None,
        rank: int = CONTROLLER,
        timeline: Timeline | None = None,
    ) -> None:
        """``scale`` multiplies every cost; work without a cost in the profile takes real time."""
        super().__init__(meter=meter, rank=rank, timeline=timeline)
        self.profile = profile
        self.scale = scale
        self._prices = Prices(profile, scale)
        self.drafted = DraftTime()
        self._late = False  # whether the last piece has been an overrun so far
        self._pieces = self._overruns = 0
        self._wait_s = 0.0
        self._not_before = 0.0
        self._plans: defaultdict[int, float] = defaultdict(float)  # other rank -> planned time

    def start(self, rank: int) -> None:
        super().start(rank)
        if rank == self.rank:
            self._late = False

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Waits until the cost of this rank's work has elapsed, or counts an overrun if it has;
        work without a cost ends now. For any other rank, only its planned time advances.
        """
        if num_tokens <= 0:
            return
        if self._acting is not None and rank == self.rank:
            rank = self._acting
        cost = self._prices.seconds(kind, num_tokens, rank)
        if rank != self.rank:
            self._plans[rank] = (
                self._plans[rank] + cost if cost else max(self._plans[rank], self.now())
            )
            return
        began, continues = self._take_start()
        began = max(began, self._not_before)
        done, due = self.now(), began + cost
        if not cost:  # not priced: real time
            self._start = done
            self._note(kind, num_tokens, began, done, done)
            return
        if continues and self._late:  # counted as an overrun so far; judged as a whole below
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
        self._start = due
        self._note(kind, num_tokens, began, ended, done)

    def align(self, rank: int, to: int) -> None:
        """Makes the next work of ``rank`` start no earlier than the planned end of the work of
        ``to``; for this process's own rank as ``to``, no earlier than now and than the earliest
        start of its next work.
        """
        if rank == self.rank:
            self._not_before = max(self._not_before, self._plans[to])
        else:
            at = max(self.now(), self._not_before) if to == self.rank else self._plans[to]
            self._plans[rank] = max(self._plans[rank], at)

    def follow(self, rank: int, to: int) -> None:
        """Counts this rank's next work from the time planned for ``to``, even if it begins late."""
        if rank == self.rank:
            at = self._plans[to]
            self._start = at if self._start is None else max(self._start, at)
            self._planned = True
        else:
            self.align(rank, to)

    def barrier(self, ranks: Sequence[int]) -> None:
        plans = self._plans
        latest = max([plans[rank] for rank in ranks])
        if latest > self.now():
            self.wait_until(latest)
        plans.update(dict.fromkeys(ranks, self.now()))

    def busy(self, rank: int) -> bool:
        return self._plans[rank] > self.now()

    def ends_s(self, rank: int) -> float | None:
        return self._plans[rank]

    def _note(self, kind: Work, num_tokens: int, began: float, ended: float, done: float) -> None:
        self._busy_s += ended - began
        if self.drafting:
            done_s = max(self._plans.values(), default=0.0)
            self.drafted.add(began_s=began, seconds=ended - began, target_done_s=done_s)
        if self.timeline is not None:
            work_s = max(0.0, done - began)
            self.timeline.add(self.rank, kind.value, began, ended - began, num_tokens, work_s)

    def report(self) -> ClockReport:
        return replace(
            super().report(), pieces=self._pieces, overruns=self._overruns, wait_s=self._wait_s
        )
