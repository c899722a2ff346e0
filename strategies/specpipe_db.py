"""SpecPipe-DB: SpecPipe for many requests (arXiv 2504.04104 v2, 3.4, section 4, 4.4).

The levels of all requests travel as one ragged batch per step; a miss empties the tree of its own
request only. Keys and values lie in blocks (PagedAttention), new requests enter as soon as there is
a place (vLLM's prefill priority). With ``shared_width`` the step's nodes are shared by what a step
costs, which the paper does not do.
"""

from __future__ import annotations

from specdec.clocks import LatencyProfile
from specdec.compose.workbench import Parts, Workbench
from specdec.policies import AdaptiveWidth, FixedWidth
from specdec.serving import ServingRules
from specdec.sources import DraftModelSource
from specdec.verifiers import MatchVerifier


def build(
    bench: Workbench,
    *,
    width: int = 64,
    children: int = 16,
    stages: int = 8,
    kv_tokens: int = 65536,
    shared_width: bool = False,
    profile: LatencyProfile | None = None,
) -> Parts:
    """SpecPipe-DB with the values of the paper's section 4.

    Args:
        bench: models, clock and seed.
        width: nodes per level and request (at most, where the width is shared).
        children: candidates per node.
        stages: of the pipeline.
        kv_tokens: tokens and nodes that a stage's cache holds.
        shared_width: levels narrow as the batch grows.
        profile: what a step costs, for the shared width; None to measure it.
    """
    policy = (
        AdaptiveWidth(width=width, children=children, latency=stages, profile=profile)
        if shared_width
        else FixedWidth(width=width, children=children)
    )
    return bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=policy,
        verifier=MatchVerifier(),
        stages=stages,
        serving=ServingRules(kv_tokens=kv_tokens),
    )
