"""Theoretical speed-up of early-exit drafting: Eq. 4 and 6 of PPSD (arXiv 2509.19368).

Letters as in the paper: alpha is the probability that a draft token is accepted if those before it
were, gamma the number of draft tokens per pass, N the layers of the target, E the layers before the
exit. Costs are counted in layers; heads, transfers and the controller cost nothing.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from specdec.metrics.speedup import SpeedupLaw


def eesd_law(gamma: int, exit_layer: int, num_layers: int) -> SpeedupLaw:
    """Eq. 4: drafting with the first E layers, then verifying (EESD).

    A round has gamma passes through the first E layers. Then the last draft token passes these E
    layers, and all draft tokens pass the other N - E.
    """
    return SpeedupLaw(plain=num_layers, gamma=gamma, draft=exit_layer)


def ppsd_law(exit_layer: int, num_layers: int, num_stages: int | None = None) -> SpeedupLaw:
    """Eq. 6: verifying while drafting in a pipeline (PPSD).

    An accepted token costs E layers, a rejected one a pass through all ceil(N / E) stages, with the
    last one counted as a whole stage. With another ``num_stages`` (for which the paper states no
    equation) an accepted token takes the ceil(E num_stages / N) steps to its exit, and a rejected
    one all stages.
    """
    stages = ceil(num_layers / exit_layer)
    if num_stages is None or num_stages == stages:
        rejected = stages * exit_layer
        return SpeedupLaw(plain=num_layers, accepted=exit_layer, rejected=rejected)
    steps = ceil(exit_layer * num_stages / num_layers)
    return SpeedupLaw(plain=num_stages, accepted=steps, rejected=num_stages)


def law_of(policy: Any, exit_layer: int, num_layers: int, latency: int) -> SpeedupLaw | None:
    """Returns the law of a strategy with one early exit; None if none applies.

    ``latency`` is the number of steps from submission to answer.
    """
    if policy.follows_exits and latency > 1:
        law = ppsd_law(exit_layer, num_layers, latency)
        return replace(law, alpha="hit_rate") if policy.width > 1 else law
    gamma = policy.chain_length
    return None if gamma is None else eesd_law(gamma, exit_layer, num_layers)
