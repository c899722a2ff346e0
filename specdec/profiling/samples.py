"""Repeated measurements."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one piece of work.

    Attributes:
        tokens: rows that it was about.
        ms: one time per repeat, in order; of a difference, it may be below 0.
    """

    tokens: int
    ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """What goes into a profile."""
        return max(0.0, median(self.ms))

    @property
    def spread(self) -> float:
        """Half of the range over the median: how far to trust it."""
        return (max(self.ms) - min(self.ms)) / 2 / self.median_ms if self.median_ms else 0.0
