"""Staged speculative decoding (arXiv 2308.04623): the draft is itself sped up by an n-gram model.

Token tree: section 3.1. Second stage: section 3.2, a Katz back-off model counted from samples of
the draft; the tree is exactly the one that the draft alone would have built.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from specdec.policies import Static
from specdec.sources import DraftModelSource, NGramSource, StagedSource
from specdec.verifiers import MatchVerifier

BRANCHING = (2, 2, 1, 1)
"""Second choices early, where agreement is likeliest (3.1); the paper states no shape."""


def build(
    bench: Workbench,
    *,
    branching: Sequence[int] = BRANCHING,
    verifier: Verifier | None = None,
) -> Parts:
    """A static tree from a staged source.

    Args:
        bench: models, clock and seed.
        branching: children per node, level by level.
        verifier: ``match`` where omitted; the paper's own is rejection.
    """
    verifier = verifier or MatchVerifier()
    sample = verifier.needs.draft_probs
    source = StagedSource(
        draft=DraftModelSource(runner=bench.draft_runner(), sample=sample),
        cheap=NGramSource(katz=bench.pair.katz()),
    )
    return bench.parts(source=source, policy=Static(branching=list(branching)), verifier=verifier)
