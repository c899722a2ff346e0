"""Several exits of the target, one chosen for each token (PPSD, arXiv 2509.19368, B.3).

B.3 names the idea as future work and states no rule; ours is in ``MultiExitSource``. With ``gamma``
drafts are verified afterwards (EESD), without it while drafting (PPSD).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.compose.workbench import Parts, Workbench
from specdec.executors.layout import StageLayout
from specdec.interfaces import TreePolicy, Verifier
from specdec.policies import Chain, FixedWidth
from specdec.sources import MultiExitSource
from specdec.verifiers import MatchVerifier


def build(
    bench: Workbench,
    *,
    gamma: int | None = None,
    further_exits: Sequence[int] | None = None,
    stages: int | None = None,
    verifier: Verifier | None = None,
) -> Parts:
    """A chain from exits of several depths.

    Args:
        bench: models with an exit layer, clock and seed.
        gamma: draft tokens per pass, verified afterwards on one device; None for a pipeline that is
            fed one token per step.
        further_exits: layers before the exits beside the model's own; one at twice its depth where
            omitted.
        stages: of the pipeline, or that a profile prices; ceil(N / E) where omitted.
        verifier: ``match`` where omitted.
    """
    verifier, pair = verifier or MatchVerifier(), bench.pair
    layout = StageLayout(
        stages=stages or -(-pair.num_layers // pair.exit_layer), after_drafting=gamma is not None
    )
    source = MultiExitSource(
        places=bench.exit_places(layout),
        vocab_size=pair.vocab_size,
        further_exits=further_exits,
        sample=verifier.needs.draft_probs,
    )
    policy: TreePolicy = FixedWidth(width=1, children=1) if gamma is None else Chain(gamma=gamma)
    return bench.parts(source=source, policy=policy, verifier=verifier, stages=layout)
