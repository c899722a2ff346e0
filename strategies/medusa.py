"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state.

A baseline of PPSD's Table 2. Head k guesses the token k further on than the next one (2.1.1); the
tree is the Cartesian product of each head's best candidates (2.1.2), without the search for a
sparser one (2.3.3).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from specdec.policies import Static
from specdec.sources import MedusaSource
from specdec.verifiers import MatchVerifier

BRANCHING = (9, 2, 1, 1)
"""Candidates of each head, first to last: 63 nodes and the root."""


def build(
    bench: Workbench,
    *,
    heads: int = 4,
    branching: Sequence[int] = BRANCHING,
    verifier: Verifier | None = None,
    stages: int | None = None,
) -> Parts:
    """A static tree of the heads' candidates.

    Args:
        bench: models, clock and seed.
        heads: how many; untrained ones where the model has no trained ones.
        branching: children per node, level by level; at most as many levels as heads count.
        verifier: ``match`` where omitted; the paper's own is typical acceptance.
        stages: of a pipeline; None for one device.
    """
    verifier = verifier or MatchVerifier()
    source = MedusaSource(
        load_heads=bench.medusa_heads,
        clock=bench.clock,
        heads=heads,
        sample=verifier.needs.draft_probs,
    )
    policy = Static(branching=list(branching))
    return bench.parts(source=source, policy=policy, verifier=verifier, stages=stages)
