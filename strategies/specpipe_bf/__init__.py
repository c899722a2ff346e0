"""SpecPipe's node budget spent best first: ours, beyond the paper.

Each step feeds the most probable unsubmitted nodes of any level, where ``specpipe`` feeds the next
level whole. Same draft, width, children and pipeline.

    parts = specpipe_bf.build(bench, width=32, stages=4)
"""

from __future__ import annotations

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench
from strategies.specpipe_bf.policy import PipelineBestFirst

__all__ = ["PipelineBestFirst", "build"]


def build(
    bench: Workbench,
    *,
    width: int | None = None,
    children: int | None = None,
    draft_passes: int | None = None,
    stages: int | None = None,
) -> Parts:
    """SpecPipe's sizes, fed best first.

    Args:
        bench: models, clock and seed.
        width: nodes per step.
        children: candidates per node.
        draft_passes: draft passes per step; 1 in SpecPipe.
        stages: of the pipeline.
    """
    tree = {"policy.width": width, "policy.children": children}
    keys = {"policy.draft_passes": draft_passes, "executor.stages": stages}
    return build_preset("specpipe_bf", bench, {**tree, **keys})
