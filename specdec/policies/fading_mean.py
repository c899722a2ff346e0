from dataclasses import dataclass


@dataclass(slots=True)
class FadingMean:
    """A weighted mean, or a ratio of two sums, in which older rounds count exponentially less.

    Attributes:
        fade: factor by which each round lowers the weight of all before it.
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
        """Returns the mean together with ``prior``, to which it returns when nothing is added."""
        return (self.total + weight * prior) / (self.weight + weight)
