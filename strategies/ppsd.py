"""PPSD (arXiv 2509.19368): a pipeline that verifies while its first stage drafts by early exit.

Stages: 4.1, ceil(N / E) of them, the last one shorter where E does not divide N; or more and
smaller ones, and the exit token comes from a later stage (Alg. 1, lines 16-18 and 27-31). Verify
while drafting: 4.2. Match is Alg. 1, line 4; rejection is Eq. 2.
"""

from __future__ import annotations

from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from specdec.policies import FixedWidth
from specdec.sources import EarlyExitSource
from specdec.verifiers import MatchVerifier


def build(
    bench: Workbench,
    *,
    stages: int | None = None,
    width: int = 1,
    children: int = 1,
    verifier: Verifier | None = None,
) -> Parts:
    """One draft token per step; with more width a level of the exit's candidates (ours).

    Args:
        bench: models with an exit layer, clock and seed.
        stages: of the pipeline; ceil(N / E) where omitted.
        width: nodes per level; 1 in the paper.
        children: candidates per node; 1 in the paper.
        verifier: ``match`` where omitted.
    """
    verifier, pair = verifier or MatchVerifier(), bench.pair
    return bench.parts(
        source=EarlyExitSource(
            front=None, vocab_size=pair.vocab_size, sample=verifier.needs.draft_probs
        ),
        policy=FixedWidth(width=width, children=children),
        verifier=verifier,
        stages=stages or -(-pair.num_layers // pair.exit_layer),
    )
