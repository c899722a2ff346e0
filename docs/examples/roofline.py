"""A clock outside the library: virtual time by the roofline model of one accelerator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field

from specdec.clocks import CONTROLLER, Clock, ClockKind, Timeline, Work

Size = Annotated[float, Field(gt=0)]  # an alias of the author's own


class Roofline(Clock):
    """A pass takes as long as reading its weights or computing its rows, whichever is longer."""

    kind = ClockKind.SIMULATED  # virtual: results are labelled simulated

    def __init__(
        self,
        *,
        stage_gb: Size,
        draft_gb: Size,
        bandwidth_gb_s: Size,
        tflops: Size,
        timeline: Timeline | None = None,
    ) -> None:
        """Takes the keys of its YAML.

        Args:
            stage_gb, draft_gb: 16-bit weights of a stage and of the draft model, 1e9 bytes.
            bandwidth_gb_s: memory bandwidth.
            tflops: peak compute.
            timeline: injected; receives a span per piece of work of a traced run.
        """
        self.timeline = timeline
        self._gb = {Work.STAGE: stage_gb, Work.DRAFT: draft_gb}  # other work costs nothing
        self._bandwidth, self._tflops = bandwidth_gb_s, tflops
        self._time: defaultdict[int, float] = defaultdict(float)  # rank -> seconds
        self._charged: int = CONTROLLER  # rank that the controller's charges go to

    def seconds(self, kind: Work, num_tokens: int) -> float:
        """Duration of one pass; 2 operations per 2-byte weight and row."""
        gb = self._gb.get(kind, 0.0)
        return max(gb / self._bandwidth, gb * num_tokens / (1000 * self._tflops))

    def start(self, rank: int) -> None:
        """No effect: the rank's own time is the start of its work."""

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Advances the rank's time."""
        cost = self.seconds(kind, num_tokens) if num_tokens else 0.0
        rank = self._charged if rank == CONTROLLER else rank
        if cost and self.timeline is not None:
            self.timeline.add(rank, kind.value, self._time[rank], cost, num_tokens)
        self._time[rank] += cost

    def align(self, rank: int, to: int) -> None:
        """The rank waits for the end of the work of ``to``."""
        self._time[rank] = max(self._time[rank], self._time[to])

    def barrier(self, ranks: Sequence[int]) -> None:
        """The controller and the ranks continue at the latest of their times."""
        latest = max(self._time[rank] for rank in (CONTROLLER, *ranks))
        self._time.update(dict.fromkeys((CONTROLLER, *ranks), latest))

    def busy(self, rank: int) -> bool:
        """Whether the rank's work ends after the controller's time."""
        return self._time[rank] > self._time[CONTROLLER]

    def ends_s(self, rank: int) -> float | None:
        """The rank's time."""
        return self._time[rank]

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Inside the block, charges of the controller go to ``rank``, such as a draft's device."""
        self.align(rank, CONTROLLER)
        self._charged = rank
        try:
            yield
        finally:
            self._charged = CONTROLLER

    def now(self) -> float:
        """The controller's time."""
        return self._time[CONTROLLER]

    def wait_until(self, seconds: float) -> None:
        """Advances the controller's time."""
        self._time[CONTROLLER] = max(self._time[CONTROLLER], seconds)
