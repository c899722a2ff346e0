"""PPSD's equations (2509.19368): N layers, exit after E, acceptance alpha, draft length gamma."""

from __future__ import annotations

from math import ceil


def eesd_speedup(alpha: float, exit_layer: int, num_layers: int, gamma: int) -> float:
    """Eq. 4: N (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma E + N)), drafting then verifying."""
    tokens = gamma + 1.0 if alpha == 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)
    return tokens * num_layers / (gamma * exit_layer + num_layers)


def overall_acceptance(alpha: float, gamma: int) -> float:
    """Eq. 5: alpha (1 - alpha^gamma) / ((1 - alpha) gamma), accepted over drafted tokens."""
    if alpha == 1.0:
        return 1.0
    return alpha * (1.0 - alpha**gamma) / ((1.0 - alpha) * gamma)


def alpha_of_overall(overall: float, gamma: int) -> float:
    """The alpha at which Eq. 5 gives an overall acceptance rate, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if overall_acceptance(middle, gamma) < overall else (low, middle)
    return (low + high) / 2


def ppsd_speedup(alpha: float, exit_layer: int, num_layers: int) -> float:
    """Eq. 6: N / (alpha E + (1 - alpha) ceil(N / E) E)."""
    stages = ceil(num_layers / exit_layer)
    return num_layers / (alpha * exit_layer + (1.0 - alpha) * stages * exit_layer)


def ppsd_speedup_small_stages(alpha: float, exit_layer: int, num_layers: int) -> float:
    """With stages of S < E layers, S dividing N (4.1): a miss costs N, not ceil(N / E) E."""
    return num_layers / (alpha * exit_layer + (1.0 - alpha) * num_layers)


def advantage(alpha: float, exit_layer: int, num_layers: int, gamma: int) -> float:
    """Eq. 7: PPSD over EESD."""
    return ppsd_speedup(alpha, exit_layer, num_layers) / eesd_speedup(
        alpha, exit_layer, num_layers, gamma
    )


def alpha_of_speedup(speedup: float, exit_layer: int, num_layers: int) -> float:
    """The alpha at which Eq. 6 gives a speed-up, E dividing N."""
    return (1.0 - 1.0 / speedup) / (1.0 - exit_layer / num_layers)
