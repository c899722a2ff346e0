from collections import defaultdict
from collections.abc import Sequence

from specdec.clocks.interface import CONTROLLER, Clock, ClockKind, DraftTime, Timeline
from specdec.clocks.profile import LatencyProfile, Prices, Work


class SimulatedClock(Clock):
    """A virtual clock: each rank's time advances by the cost of its work in a latency profile."""

    kind = ClockKind.SIMULATED
    profile: LatencyProfile
    drafted: DraftTime

    def __init__(
        self, profile: LatencyProfile, *, scale: float = 1.0, timeline: Timeline | None = None
    ) -> None:
        self.profile = profile
        self.scale = scale
        self.timeline = timeline
        self.busy_s: defaultdict[int, float] = defaultdict(float)
        self.drafted = DraftTime()
        self._time: defaultdict[int, float] = defaultdict(float)
        self._prices = Prices(profile, scale)

    def start(self, rank: int) -> None:
        """Does nothing, because work begins at the rank's current virtual time."""

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        if self._acting is not None and rank == CONTROLLER:
            rank = self._acting
        cost = self._prices.seconds(kind, num_tokens, rank)
        if cost:
            if self.timeline is not None:
                self.timeline.add(rank, kind.value, self._time[rank], cost, num_tokens)
            if rank == CONTROLLER and self.drafting:
                done = max((t for r, t in self._time.items() if r != CONTROLLER), default=0.0)
                began = self._time[rank]
                self.drafted.add(began_s=began, seconds=cost, target_done_s=done)
            self._time[rank] += cost
            self.busy_s[rank] += cost

    def align(self, rank: int, to: int) -> None:
        time = self._time
        if (other := time[to]) > time[rank]:
            time[rank] = other

    def delay(self, rank: int, until_s: float) -> None:
        """Makes the rank's next work start no earlier than ``until_s``."""
        self._time[rank] = max(self._time[rank], until_s)

    def cancel(self, rank: int, since_s: float, free_s: float) -> None:
        """Removes the rank's work after ``since_s``; the rank is then free from ``free_s`` on."""
        self.busy_s[rank] -= self._time[rank] - since_s
        self._time[rank] = free_s
        if self.timeline is not None:
            spans = self.timeline.spans
            spans[:] = [s for s in spans if s.rank != rank or s.start_s < since_s]

    def barrier(self, ranks: Sequence[int]) -> None:
        latest = max(self._time[CONTROLLER], *(self._time[r] for r in ranks))
        self._time[CONTROLLER] = latest
        for rank in ranks:
            self._time[rank] = latest

    def busy(self, rank: int) -> bool:
        return self._time[rank] > self._time[CONTROLLER]

    def ends_s(self, rank: int) -> float:
        return self._time[rank]

    def now(self) -> float:
        return self._time[CONTROLLER]

    def wait_until(self, seconds: float) -> None:
        self._time[CONTROLLER] = max(self._time[CONTROLLER], seconds)
