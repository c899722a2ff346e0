"""PPSD's equations (2509.19368) solved for alpha: the acceptance that a figure implies."""

from __future__ import annotations

from specdec.sources.exit_laws import eq5_acceptance


def alpha_of_overall(overall: float, gamma: int) -> float:
    """The alpha at which Eq. 5 gives an overall acceptance rate, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if eq5_acceptance(middle, gamma) < overall else (low, middle)
    return (low + high) / 2


def alpha_of_speedup(speedup: float, exit_layer: int, num_layers: int) -> float:
    """The alpha at which Eq. 6 gives a speed-up, for E that divides N."""
    return (1.0 - 1.0 / speedup) / (1.0 - exit_layer / num_layers)
