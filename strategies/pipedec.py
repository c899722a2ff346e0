"""PipeDec (arXiv 2504.04104 v1): SpecPipe's first version, width 32, 14 stages.

Deviations: as ``specpipe``; docs/specpipe.md lists them.

    parts = pipedec.build(bench, stages=7)
"""

from __future__ import annotations

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench


def build(
    bench: Workbench,
    *,
    width: int | None = None,
    children: int | None = None,
    stages: int | None = None,
) -> Parts:
    """PipeDec with the values of its section 4.

    Args:
        bench: models, clock and seed.
        width: nodes per level.
        children: candidates per node.
        stages: of the pipeline, one device each.
    """
    keys = {"policy.width": width, "policy.children": children, "executor.stages": stages}
    return build_preset("pipedec", bench, keys)
