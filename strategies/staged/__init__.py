"""Staged speculative decoding (arXiv 2308.04623): an n-gram model speeds up the draft itself.

Token tree: section 3.1; the paper states no shape, ours has second choices early, where agreement
is likeliest. Second stage: section 3.2, a Katz back-off model counted from samples of the draft;
the tree is the one that the draft alone would have built. Deviation: the preset's verifier is
``match`` instead of the paper's rejection.
"""

from __future__ import annotations

from strategies.staged.policy import StagedTree
from strategies.staged.source import StagedSource

__all__ = ["StagedSource", "StagedTree"]
