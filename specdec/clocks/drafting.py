from __future__ import annotations

from specdec.clocks.interface import Clock
from specdec.clocks.meter import Meter


class Drafting:
    """Inside the block, work charged to the clock and model calls of the meter count as drafting.

    A class, because a generator with ``contextmanager`` would cost microseconds in every pass.
    """

    def __init__(self, clock: Clock, meter: Meter) -> None:
        self._clock, self._meter = clock, meter

    def __enter__(self) -> None:
        self._clock.drafting = self._meter.drafting = True

    def __exit__(self, *_: object) -> None:
        self._clock.drafting = self._meter.drafting = False
