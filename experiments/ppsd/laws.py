"""PPSD's equations (arXiv 2509.19368), also solved for alpha: the acceptance that a figure implies.

Letters as in ``specdec.sources.early_exit``.
"""

from __future__ import annotations

from math import ceil

from specdec.metrics.speedup import expected_accepted
from specdec.sources.early_exit import eesd_law, ppsd_law


def eq4_speedup(alpha: float, gamma: int, exit_layer: int, num_layers: int) -> float:
    """Eq. 4: EESD over plain decoding, (1 - alpha^(gamma+1)) N / ((1 - alpha) (gamma E + N))."""
    return eesd_law(gamma, exit_layer, num_layers).speedup(alpha)


def eq5_acceptance(alpha: float, gamma: int) -> float:
    """Eq. 5: accepted over proposed draft tokens, E(gamma) / gamma; falls with gamma."""
    return expected_accepted(alpha, gamma) / gamma


def eq6_speedup(alpha: float, exit_layer: int, num_layers: int) -> float:
    """Eq. 6: PPSD over plain decoding, N / (alpha E + (1 - alpha) ceil(N / E) E).

    Below 1 at alpha = 0 where E does not divide N.
    """
    return ppsd_law(exit_layer, num_layers).speedup(alpha)


def walk_ms(num_stages: int, stage: float, output: float = 0.0, transfer: float = 0.0) -> float:
    """Time of a token through all stages, its answer back at the first: plain decoding's too."""
    return num_stages * (stage + transfer) + output


def free_costs_ms(
    num_stages: int, stage: float, head: float, output: float = 0.0, transfer: float = 0.0
) -> tuple[float, float]:
    """Milliseconds of an accepted and of a rejected token where ranks wait for what they receive.

    Each pass of the first stage computes, sends its rows and runs the exit head (Algorithm 1, lines
    8 to 13). An accepted token costs one pass. A verdict is read between two passes (line 3), so a
    rejected token costs as many as last until its answer is back. For a first stage that is the
    slowest with its head.
    """
    one = stage + transfer + head
    return one, ceil(walk_ms(num_stages, stage, output, transfer) / one - 1e-9) * one


def paid_speedup(alpha: float, exit_layer: int, num_layers: int, output: float) -> float:
    """Eq. 6 if heads cost time by their weights, delay rows, and a verdict breaks off a pass.

    The first stage has a head of a layer and an output matrix of ``output`` layers, the last stage
    the target's own. An accepted token costs a step of the first stage, a rejected one a walk
    through all of them; plain decoding has no head. See ``free_costs_ms`` for passes that end.
    """
    accepted = exit_layer + 1 + output
    walk = ceil(num_layers / exit_layer) * exit_layer + 1 + 2 * output
    return (num_layers + output) / (alpha * accepted + (1.0 - alpha) * walk)


def eq7_gain(alpha: float, gamma: int, exit_layer: int, num_layers: int) -> float:
    """Eq. 7: PPSD over EESD, Eq. 6 / Eq. 4.

    The paper states that it is always above 1; it is not where E does not divide N and alpha is
    small. At alpha = 1 it is (gamma + N / E) / (gamma + 1); the paper prints gamma + N / E.
    """
    return eq6_speedup(alpha, exit_layer, num_layers) / eq4_speedup(
        alpha, gamma, exit_layer, num_layers
    )


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
