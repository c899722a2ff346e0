"""SpecInfer's static token tree (Miao et al. 2024), in a pipeline the papers' STPP.

The whole tree is verified at once. STPP's tree is read as 1,1,3,1,1,1,1,1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from specdec.policies import Static
from specdec.serving import Feeding, ServingRules
from specdec.sources import DraftModelSource
from specdec.verifiers import MatchVerifier

BRANCHING = (1, 1, 3, 1, 1, 1, 1, 1)
"""Children per node, level by level."""


def build(
    bench: Workbench,
    *,
    branching: Sequence[int] = BRANCHING,
    verifier: Verifier | None = None,
    stages: int | None = None,
    draft_overlap: Literal["none", "rule", "full"] = "none",
) -> Parts:
    """A static tree from a draft model.

    Args:
        bench: models, clock and seed.
        branching: children per node, level by level.
        verifier: ``match`` where omitted; the paper's own is multi-round rejection.
        stages: of a pipeline; None for one device.
        draft_overlap: whether the next tree is drafted while this one is verified; see
            ``policies.Static``.
    """
    verifier = verifier or MatchVerifier()
    source = DraftModelSource(runner=bench.draft_runner(), sample=verifier.needs.draft_probs)
    policy = Static(branching=list(branching), draft_overlap=draft_overlap)
    serving = ServingRules(feeding=Feeding.ITERATION)
    return bench.parts(
        source=source, policy=policy, verifier=verifier, stages=stages, serving=serving
    )
