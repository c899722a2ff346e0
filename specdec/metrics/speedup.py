from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupLaw:
    """Costs of a strategy, which determine its speed-up at any acceptance rate alpha.

    Costs share one unit, such as layers; transfers and the controller cost nothing. There are two
    formulas:

    Drafting, then verifying ``gamma`` tokens (Leviathan et al. 2023, Theorem 3.8):
        ``(expected_accepted(alpha, gamma) + 1) * plain / (gamma * draft + plain)``.
    Verifying while drafting, one token at a time (``gamma`` 0):
        ``plain / (alpha * accepted + (1 - alpha) * rejected)``.
    """

    plain: float  # cost of a token in plain decoding
    gamma: int = 0  # draft tokens per verification
    draft: float = 0  # cost of a draft token
    accepted: float = 0  # cost of a token whose draft is accepted
    rejected: float = 0  # cost of a token whose draft is rejected
    alpha: str = "acceptance_rate_verified"  # name of the metric that gives alpha

    def speedup(self, alpha: float) -> float:
        """Returns the speed-up over plain decoding; ``alpha`` outside 0 .. 1 is a ValueError."""
        accepted = expected_accepted(alpha, self.gamma)
        if self.gamma:
            return (accepted + 1.0) * self.plain / (self.gamma * self.draft + self.plain)
        return self.plain / (alpha * self.accepted + (1.0 - alpha) * self.rejected)

    def of(self, metrics: dict[str, Any]) -> float | None:
        alpha = metrics[self.alpha]
        return None if alpha is None else self.speedup(alpha)


def expected_accepted(alpha: float, gamma: int) -> float:
    """Returns ``alpha (1 - alpha^gamma) / (1 - alpha)``, the expected number of accepted tokens
    among ``gamma`` draft tokens (Leviathan et al. 2023, Eq. 1, without the target's own token);
    ValueError for ``alpha`` outside 0 .. 1.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha={alpha} must be a probability")
    return float(gamma) if alpha == 1.0 else alpha * (1.0 - alpha**gamma) / (1.0 - alpha)
