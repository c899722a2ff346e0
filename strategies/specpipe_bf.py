"""SpecPipe's budget spent best first: ours, beyond the paper.

Each step feeds the most probable unsubmitted nodes whatever their level, where SpecPipe
(``specpipe.py``) feeds the next level whole. Same draft, width, children and pipeline.
"""

from __future__ import annotations

from specdec.compose.workbench import Parts, Workbench
from specdec.policies import PipelineBestFirst
from specdec.sources import DraftModelSource
from specdec.verifiers import MatchVerifier


def build(
    bench: Workbench,
    *,
    width: int = 64,
    children: int = 16,
    draft_passes: int = 2,
    stages: int = 8,
) -> Parts:
    """SpecPipe's sizes, fed best first.

    Args:
        bench: models, clock and seed.
        width: nodes per step.
        children: candidates per node.
        draft_passes: draft passes per step; 1 is SpecPipe's own share of drafting.
        stages: of the pipeline.
    """
    return bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=PipelineBestFirst(width=width, children=children, draft_passes=draft_passes),
        verifier=MatchVerifier(),
        stages=stages,
    )
