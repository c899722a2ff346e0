"""Theoretical speed-up over plain decoding as a function of the acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupLaw:
    """Costs of a strategy, from which the speed-up at any acceptance alpha follows.

    Costs share one unit, such as layers; transfers and the controller cost nothing. Two forms:

    Drafting, then verifying ``gamma`` tokens (Leviathan et al. 2023, Theorem 3.8):
        ``(expected_accepted(alpha, gamma) + 1) * plain / (gamma * draft + plain)``.
    Verifying while drafting, one token at a time (``gamma`` 0):
        ``plain / (alpha * accepted + (1 - alpha) * rejected)``.

    Attributes:
        plain: cost of a token in plain decoding.
        gamma: draft tokens per verification.
        draft: cost of a draft token.
        accepted, rejected: cost of a token whose draft is accepted, or rejected.
        alpha: name of the metric that gives alpha.
    """

    plain: float
    gamma: int = 0
    draft: float = 0
    accepted: float = 0
    rejected: float = 0
    alpha: str = "acceptance_rate_verified"

    def speedup(self, alpha: float) -> float:
        """Speed-up over plain decoding.

        Raises:
            ValueError: ``alpha`` outside 0 .. 1.
        """
        accepted = expected_accepted(alpha, self.gamma)
        if self.gamma:
            return (accepted + 1.0) * self.plain / (self.gamma * self.draft + self.plain)
        return self.plain / (alpha * self.accepted + (1.0 - alpha) * self.rejected)

    def of(self, metrics: dict[str, Any]) -> float | None:
        """Speed-up at the acceptance that a run has measured; None if it is undefined."""
        alpha = metrics[self.alpha]
        return None if alpha is None else self.speedup(alpha)


def expected_accepted(alpha: float, gamma: int) -> float:
    """Expected accepted tokens of ``gamma`` draft tokens.

    ``alpha (1 - alpha^gamma) / (1 - alpha)`` (Leviathan et al. 2023, Eq. 1, less the target's own
    token).

    Args:
        alpha, gamma: chance that a draft token is accepted if those before it were; their number.

    Raises:
        ValueError: ``alpha`` outside 0 .. 1.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha={alpha} must be a probability")
    return float(gamma) if alpha == 1.0 else alpha * (1.0 - alpha**gamma) / (1.0 - alpha)
