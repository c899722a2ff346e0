"""SpecPipe and PipeDec: a pipeline fed one level of a dynamic tree per step (arXiv 2504.04104).

v2 is SpecPipe (width 64), v1 PipeDec (width 32); ``pipedec.py`` has the latter's values.
Token source: draft model on its own rank (v2 3.3.1). Tree: fixed width (v2 3.3.3, v1 3.3).
Steps: compute, prune, transmit (v2 3.3.2 and Algorithm 1, reconstructed).
"""

from __future__ import annotations

from specdec.compose.workbench import Parts, Workbench
from specdec.policies import FixedWidth
from specdec.serving import Feeding, ServingRules
from specdec.sources import DraftModelSource
from specdec.verifiers import MatchVerifier


def build(
    bench: Workbench,
    *,
    width: int = 64,
    children: int = 16,
    stages: int = 8,
    levels_per_step: int = 1,
) -> Parts:
    """SpecPipe with the values of its section 4.

    Args:
        bench: models, clock and seed.
        width: nodes per level.
        children: candidates per node.
        stages: of the pipeline.
        levels_per_step: 1 in the paper; section 3.4 says that more is worse.
    """
    return bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=FixedWidth(width=width, children=children, levels_per_step=levels_per_step),
        verifier=MatchVerifier(),
        stages=stages,
        serving=ServingRules(feeding=Feeding.ITERATION),
    )
