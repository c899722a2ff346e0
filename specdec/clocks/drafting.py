"""What the controller does while a token source runs."""

from __future__ import annotations

from specdec.clocks.interface import Clock
from specdec.clocks.meter import Meter


class Drafting:
    """Context in which a clock's charges and a meter's model calls count as drafting.

    A class, because a generator with ``contextmanager`` would cost microseconds in every pass.
    """

    def __init__(self, clock: Clock, meter: Meter) -> None:
        """Stores both; they are marked while the block runs."""
        self._clock, self._meter = clock, meter

    def __enter__(self) -> None:
        self._clock.drafting = self._meter.drafting = True

    def __exit__(self, *_: object) -> None:
        self._clock.drafting = self._meter.drafting = False
