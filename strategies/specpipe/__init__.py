"""SpecPipe (arXiv 2504.04104 v2): a pipeline fed one level of a dynamic tree per step.

Token source: a draft model on its own rank (3.3.1). Tree: fixed width (3.3.3). Steps: compute,
prune, transmit (3.3.2 and Algorithm 1, reconstructed). Deviations: docs/specpipe.md. ``pipedec``
has the first version of the paper.

    parts = specpipe.build(bench, width=32, stages=4)
"""

from __future__ import annotations

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench
from strategies.specpipe.verifiers import RelaxedVerifier, StrictVerifier

__all__ = ["RelaxedVerifier", "StrictVerifier", "build"]


def build(
    bench: Workbench,
    *,
    width: int | None = None,
    children: int | None = None,
    stages: int | None = None,
    levels_per_step: int | None = None,
) -> Parts:
    """SpecPipe with the values of its section 4.

    Args:
        bench: models, clock and seed.
        width: nodes per level.
        children: candidates per node.
        stages: of the pipeline.
        levels_per_step: 1 in the paper; section 3.4 states that more is worse.
    """
    tree = {"policy.width": width, "policy.children": children}
    keys = {"policy.levels_per_step": levels_per_step, "executor.stages": stages}
    return build_preset("specpipe", bench, {**tree, **keys})
