"""PipeDec (arXiv 2504.04104 v1): SpecPipe's first version, width 32, 14 stages."""

from __future__ import annotations

from specdec.compose.workbench import Parts, Workbench
from strategies import specpipe


def build(bench: Workbench, *, width: int = 32, children: int = 16, stages: int = 14) -> Parts:
    """PipeDec with the values of its section 4 (stages: one device each).

    Args:
        bench: models, clock and seed.
        width: nodes per level.
        children: candidates per node.
        stages: of the pipeline.
    """
    return specpipe.build(bench, width=width, children=children, stages=stages)
