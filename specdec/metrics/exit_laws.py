"""PPSD's theory (arXiv 2509.19368, Eq. 3-7), to be held against what runs measure.

Letters as in the paper: alpha the chance that a draft token is accepted given that those before it
were, gamma draft tokens per pass, N layers of the target, E layers before the exit. Times count
layers; heads, transfers and the controller cost nothing.
"""

from __future__ import annotations

from math import ceil


def expected_accepted(alpha: float, gamma: int) -> float:
    """E(gamma), below Eq. 3: alpha (1 - alpha^gamma) / (1 - alpha); gamma where alpha is 1."""
    _check(alpha)
    return float(gamma) if alpha == 1.0 else alpha * (1.0 - alpha**gamma) / (1.0 - alpha)


def eq3_speedup(
    alpha: float, gamma: int, *, target_one: float, target_gamma: float, draft_one: float
) -> float:
    """Eq. 3: speed-up of speculative decoding over plain decoding.

    Args:
        alpha, gamma: see above.
        target_one, target_gamma, draft_one: times of a target pass over one token and over gamma,
            and of a draft pass, in one unit.
    """
    return target_one / (gamma * draft_one + target_gamma) * (expected_accepted(alpha, gamma) + 1.0)


def eq4_speedup(alpha: float, gamma: int, exit_layer: int, num_layers: int) -> float:
    """Eq. 4: EESD over plain decoding, (1 - alpha^(gamma+1)) N / ((1 - alpha) (gamma E + N)).

    gamma drafts of E layers; then the last draft token passes the first E layers and all of them
    the other N - E.
    """
    tokens = expected_accepted(alpha, gamma) + 1.0
    return tokens * num_layers / (gamma * exit_layer + num_layers)


def eq5_acceptance(alpha: float, gamma: int) -> float:
    """Eq. 5: accepted over proposed draft tokens, E(gamma) / gamma; it falls with gamma."""
    return expected_accepted(alpha, gamma) / gamma


def eq6_speedup(alpha: float, exit_layer: int, num_layers: int) -> float:
    """Eq. 6: PPSD over plain decoding, N / (alpha E + (1 - alpha) ceil(N / E) E).

    An accepted token costs one stage, a rejected one a way through all of them. Where E does not
    divide N the shorter last stage is counted as a whole one, so alpha = 0 gives less than 1.
    """
    _check(alpha)
    through = ceil(num_layers / exit_layer) * exit_layer
    return num_layers / (alpha * exit_layer + (1.0 - alpha) * through)


def eq7_gain(alpha: float, gamma: int, exit_layer: int, num_layers: int) -> float:
    """Eq. 7: PPSD over EESD, Eq. 6 / Eq. 4.

    The paper calls it above 1 always; where E does not divide N and alpha is small it is not. At
    alpha = 1 it is (gamma + N / E) / (gamma + 1); the paper prints gamma + N / E.
    """
    return eq6_speedup(alpha, exit_layer, num_layers) / eq4_speedup(
        alpha, gamma, exit_layer, num_layers
    )


def shallow_stages_speedup(
    alpha: float, exit_layer: int, num_layers: int, num_stages: int
) -> float:
    """PPSD on stages of S = N / num_stages < E layers, over plain decoding.

    A draft token takes ceil(E / S) steps, since its exit comes from a later stage (Alg. 1), and a
    rejected one N / S: N / (alpha E + (1 - alpha) N) where S divides E. The paper states no law
    for it; with one stage per exit and E dividing N it is Eq. 6.
    """
    _check(alpha)
    steps = ceil(exit_layer * num_stages / num_layers)
    return num_stages / (alpha * steps + (1.0 - alpha) * num_stages)


def pipeline_speedup(alpha: float, exit_layer: int, num_layers: int, num_stages: int) -> float:
    """The law that fits a pipeline: Eq. 6 for ceil(N / E) stages, else that of shallow stages."""
    if num_stages == ceil(num_layers / exit_layer):
        return eq6_speedup(alpha, exit_layer, num_layers)
    return shallow_stages_speedup(alpha, exit_layer, num_layers, num_stages)


def ppsd_saving(alpha: float, exit_layer: int, num_layers: int) -> float:
    """Layers' time that a draft token of an exit is expected to save in a pipeline: alpha (N - E).

    What Eq. 6 says of one token: it takes E if it is accepted and N if it is not, where plain
    decoding takes N. A later exit costs more only where its token is right: a wrong one is found
    out at the same time.
    """
    _check(alpha)
    return alpha * (num_layers - exit_layer)


def eesd_saving(alpha: float, reach: float, exit_layer: int, num_layers: int) -> float:
    """The same where drafts are verified afterwards: reach alpha N - E.

    In Eq. 4 a draft token costs E whatever comes of it, and one that is accepted saves a target
    pass of N. ``reach`` is the chance that all draft tokens before it are accepted.
    """
    _check(alpha)
    return reach * alpha * num_layers - exit_layer


def _check(alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha={alpha} must be a probability")
