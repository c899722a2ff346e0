"""Early exit, draft then verify: the baseline of PPSD (arXiv 2509.19368, 3.1).

``gamma`` tokens are drafted with the target's first E layers and an exit head, then all of them
pass the other layers at once. With ``max_gamma`` the length is drawn by Thompson sampling ("EESD w.
TS", Table 2; Liu et al. 2024, arXiv 2406.03853).
"""

from __future__ import annotations

from specdec.compose.workbench import Parts, Workbench
from specdec.executors.layout import StageLayout
from specdec.interfaces import TreePolicy, Verifier
from specdec.policies import Chain, ThompsonChain
from specdec.sources import EarlyExitSource
from specdec.verifiers import MatchVerifier


def build(
    bench: Workbench,
    *,
    gamma: int = 5,
    max_gamma: int | None = None,
    stages: int | None = None,
    verifier: Verifier | None = None,
) -> Parts:
    """A chain from the early exit on one device.

    Args:
        bench: models with an exit layer, clock and seed.
        gamma: draft tokens per pass; 5 and 10 in the paper's Table 1.
        max_gamma: with it the length is drawn, up to this one.
        stages: that a profile prices; ceil(N / E) where omitted.
        verifier: ``match`` where omitted.
    """
    verifier, pair = verifier or MatchVerifier(), bench.pair
    layout = StageLayout(
        stages=stages or -(-pair.num_layers // pair.exit_layer), after_drafting=True
    )
    source = EarlyExitSource(
        front=bench.exit_front(layout),
        vocab_size=pair.vocab_size,
        sample=verifier.needs.draft_probs,
    )
    policy: TreePolicy = (
        Chain(gamma=gamma) if max_gamma is None else ThompsonChain(max_gamma=max_gamma)
    )
    return bench.parts(source=source, policy=policy, verifier=verifier, stages=layout)
