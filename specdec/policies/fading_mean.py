from dataclasses import dataclass, field

import numpy as np

from specdec.types import FloatArray

_OUTLIER = 3.0


@dataclass(slots=True)
class FadingMean:
    """A mean or ratio of sums, ``total`` / ``weight``, in which older rounds have less weight.

    Attributes:
        fade: factor by which each round multiplies the weight of all rounds before it.
    """

    fade: float
    total: float = 0.0
    weight: float = 0.0
    rounds: int = 0

    def add(self, total: float, weight: float = 1.0) -> None:
        self.total = self.fade * self.total + total
        self.weight = self.fade * self.weight + weight
        self.rounds += 1

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def with_prior(self, prior: float, weight: float) -> float:
        """Returns the mean combined with a ``prior`` that has the given ``weight``."""
        return (self.total + weight * prior) / (self.weight + weight)


@dataclass(slots=True)
class FadingLine:
    """Fits a line of times y over numbers of rows x by least squares. Older points have
    exponentially less weight, and a time counts as at most three times the line's prediction.
    """

    fade: float
    sums: FloatArray = field(default_factory=lambda: np.zeros(5))  # of 1, x, y, x x, x y

    def add(self, x: float, y: float) -> None:
        if self.sums[0] > 2:
            y = min(y, _OUTLIER * max(self.at(x), 1e-9))
        self.sums = self.fade * self.sums + np.array([1.0, x, y, x * x, x * y])

    @property
    def slope(self) -> float:
        """The slope of the line, at least 0; 0 if all ``x`` were equal."""
        n, x, y, xx, xy = self.sums
        spread = n * xx - x * x
        return max(0.0, float((n * xy - x * y) / spread)) if spread > 1e-6 * n * n else 0.0

    def at(self, x: float) -> float:
        n, mean_x, mean_y = self.sums[:3]
        return float((mean_y + self.slope * (n * x - mean_x)) / n)
