"""EAGLE-1, EAGLE-2 and EAGLE-3: a head drafts from the target's hidden states.

EAGLE (Li et al. 2024, arXiv 2401.15077) drafts a static tree from the last hidden state; EAGLE-2
(2406.16858) has the same head and selects nodes by its confidence; EAGLE-3 (2503.01840) reads
three hidden states. Deviations: EAGLE-1's static tree is a product of branchings instead of the
authors' irregular one; EAGLE-3's tree is that of ``best_first``, sized for CPUs (the authors' is
EAGLE-2's: ``policy=eagle2``); a tree that survives a verdict is kept.

    parts = eagle.build(bench, "eagle2", nodes=20, width=4, depth=3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specdec.compose.presets import build_preset, on_pipeline
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier


def build(
    bench: Workbench,
    preset: Literal["eagle", "eagle2", "eagle3"] = "eagle3",
    *,
    branching: Sequence[int] | None = None,
    nodes: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    early: bool | None = None,
    verifier: Verifier | None = None,
    stages: int | None = None,
) -> Parts:
    """A preset with the head of ``model.eagle_head``, or an untrained one.

    Args:
        bench: models, clock and seed.
        preset: its source and policy.
        branching: eagle: children per node, level by level.
        nodes, width, depth: eagle2: see ``BestOfBeam``.
        early: read hidden states before the answers.
        verifier: the preset's ``match`` if omitted.
        stages: stages of a pipeline; one device if omitted.
    """
    keys = {
        "policy.branching": None if branching is None else list(branching),
        "policy.nodes": nodes,
        "policy.width": width,
        "policy.depth": depth,
        "source.early": early,
        **on_pipeline(stages),
    }
    return build_preset(preset, bench, keys, verifier=verifier)
