"""SwiftSpec's tree (arXiv 2506.11309, 3.1), drafted serially on one device, sized for CPUs.

Maximum-likelihood expansion of the w best leaves, d times, then the best connected subgraph of bs
nodes. ``swiftspec.py`` has the paper's own two forms.
"""

from __future__ import annotations

from specdec.compose.workbench import Parts, Workbench
from specdec.policies import BestFirst
from specdec.sources import DraftModelSource
from specdec.verifiers import MatchVerifier


def build(
    bench: Workbench,
    *,
    bs: int = 32,
    w: int = 4,
    d: int = 6,
    min_mass: float = 0.4,
    min_prob: float = 0.04,
) -> Parts:
    """Best-first trees, drafted before each target pass.

    Args:
        bench: models, clock and seed.
        bs: nodes verified per pass, root included (8 on the paper's GPUs).
        w: leaves per expansion.
        d: expansions per pass, at most.
        min_mass, min_prob: where drafting pays no more, see ``BestFirst`` (the paper: 0).
    """
    return bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=BestFirst(bs=bs, w=w, d=d, min_mass=min_mass, min_prob=min_prob),
        verifier=MatchVerifier(),
    )
