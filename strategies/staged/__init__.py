"""Staged speculative decoding (arXiv 2308.04623): the draft is itself sped up by an n-gram model.

Token tree: section 3.1; the paper states no shape, ours has second choices early, where agreement
is likeliest. Second stage: section 3.2, a Katz back-off model counted from samples of the draft;
the tree is the one that the draft alone would have built. Deviation: the preset's verifier is
``match``, the paper's rejection.

    parts = staged.build(bench, branching=[3, 2, 1])
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from strategies.staged.policy import StagedTree
from strategies.staged.source import StagedSource

__all__ = ["StagedSource", "StagedTree", "build"]


def build(
    bench: Workbench,
    *,
    branching: Sequence[int] | None = None,
    verifier: Verifier | None = None,
) -> Parts:
    """A static tree from a staged source.

    Args:
        bench: models with token samples, clock and seed.
        branching: children per node, level by level.
        verifier: the preset's ``match`` if omitted.
    """
    shape = None if branching is None else list(branching)
    return build_preset("staged", bench, {"policy.branching": shape}, verifier=verifier)
