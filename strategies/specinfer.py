"""SpecInfer's static token tree (Miao et al. 2024, arXiv 2305.09781).

The whole tree is verified at once; on a pipeline this is STPP of the SpecPipe paper, whose tree is
read as 1,1,3,1,1,1,1,1. Deviation: the preset's verifier is ``match``, the paper's multi-round
rejection (``RejectionVerifier``).

    parts = specinfer.build(bench, branching=[2, 2, 1], stages=4)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specdec.compose.presets import build_preset, on_pipeline
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier


def build(
    bench: Workbench,
    *,
    branching: Sequence[int] | None = None,
    verifier: Verifier | None = None,
    stages: int | None = None,
    draft_overlap: Literal["none", "rule", "full"] | None = None,
) -> Parts:
    """A static tree from a draft model.

    Args:
        bench: models, clock and seed.
        branching: children per node, level by level.
        verifier: the preset's ``match`` if omitted.
        stages: stages of a pipeline; one device if omitted.
        draft_overlap: whether the next tree is drafted during verification; see
            ``policies.Static``.
    """
    shape = None if branching is None else list(branching)
    keys = {"policy.branching": shape, "policy.draft_overlap": draft_overlap}
    return build_preset("specinfer", bench, {**keys, **on_pipeline(stages)}, verifier=verifier)
