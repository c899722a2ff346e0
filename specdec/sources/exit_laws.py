"""Theory of early-exit drafting: Eq. 3-7 of PPSD (arXiv 2509.19368).

Letters as in the paper: alpha is the chance that a draft token is accepted if those before it were,
gamma the draft tokens per pass, N the layers of the target, E those before the exit. Costs are
counted in layers; heads, transfers and the controller cost nothing.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from specdec.metrics.speedup import SpeedupLaw, expected_accepted


def eesd_law(gamma: int, exit_layer: int, num_layers: int) -> SpeedupLaw:
    """Eq. 4: drafting with the first E layers, then verifying (EESD).

    gamma drafts of E layers; then the last draft token passes the first E layers and all of them
    the other N - E.
    """
    return SpeedupLaw(plain=num_layers, gamma=gamma, draft=exit_layer)


def ppsd_law(exit_layer: int, num_layers: int, num_stages: int | None = None) -> SpeedupLaw:
    """Eq. 6: verifying while drafting in a pipeline (PPSD).

    An accepted token costs E layers, a rejected one a pass through all ceil(N / E) stages, the last
    one counted as a whole stage. With more and smaller stages (the paper states no law for them) an
    accepted token takes the ceil(E num_stages / N) steps to its exit, a rejected one all stages.

    Args:
        exit_layer: E.
        num_layers: N.
        num_stages: of the pipeline; ceil(N / E) if omitted.
    """
    stages = ceil(num_layers / exit_layer)
    if num_stages is None or num_stages == stages:
        rejected = stages * exit_layer
        return SpeedupLaw(plain=num_layers, accepted=exit_layer, rejected=rejected)
    steps = ceil(exit_layer * num_stages / num_layers)
    return SpeedupLaw(plain=num_stages, accepted=steps, rejected=num_stages)


def law_of(policy: Any, exit_layer: int, num_layers: int, latency: int) -> SpeedupLaw | None:
    """The law of a strategy with one early exit; None if none applies.

    Args:
        policy: a chain (attribute ``gamma``), or levels of ``width`` nodes fed to a pipeline.
        exit_layer: E.
        num_layers: N.
        latency: steps from submission to answer.
    """
    if getattr(policy, "follows_exits", False) and latency > 1:
        law = ppsd_law(exit_layer, num_layers, latency)
        return replace(law, alpha="hit_rate") if policy.width > 1 else law
    gamma = getattr(policy, "gamma", None)
    return None if gamma is None else eesd_law(gamma, exit_layer, num_layers)


def eq3_speedup(
    alpha: float, gamma: int, *, target_one: float, target_gamma: float, draft_one: float
) -> float:
    """Eq. 3: speed-up of speculative decoding over plain decoding.

    Args:
        alpha, gamma: see the module.
        target_one, target_gamma, draft_one: times of a target pass over one token and over gamma,
            and of a draft pass, in one unit.
    """
    return target_one / (gamma * draft_one + target_gamma) * (expected_accepted(alpha, gamma) + 1.0)


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


def eq7_gain(alpha: float, gamma: int, exit_layer: int, num_layers: int) -> float:
    """Eq. 7: PPSD over EESD, Eq. 6 / Eq. 4.

    The paper states that it is always above 1; it is not where E does not divide N and alpha is
    small. At alpha = 1 it is (gamma + N / E) / (gamma + 1); the paper prints gamma + N / E.
    """
    return eq6_speedup(alpha, exit_layer, num_layers) / eq4_speedup(
        alpha, gamma, exit_layer, num_layers
    )


def ppsd_saving(alpha: float, exit_layer: int, num_layers: int) -> float:
    """Expected layers saved by a draft token of an exit in a pipeline: alpha (N - E).

    By Eq. 6 a token costs E if it is accepted and N if not, plain decoding N. A rejection is known
    at the same time whatever the exit, so a later exit costs more only for accepted tokens.
    """
    return alpha * (num_layers - exit_layer)


def eesd_saving(alpha: float, reach: float, exit_layer: int, num_layers: int) -> float:
    """Expected layers saved by a draft token that is verified afterwards: reach alpha N - E.

    By Eq. 4 a draft token costs E in any case, and an accepted one saves a target pass of N.

    Args:
        alpha: chance that the token is accepted.
        reach: chance that all draft tokens before it are accepted.
        exit_layer: E.
        num_layers: N.
    """
    return reach * alpha * num_layers - exit_layer
