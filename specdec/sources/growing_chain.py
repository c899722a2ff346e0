"""A chain that a draft model grows token by token, outside the tree (``TokenSource.chains``)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.types import FloatArray, IntArray

Chain = tuple[IntArray, FloatArray]
"""Tokens int64[L] and log-probabilities float64[L] of a chain."""


@dataclass(slots=True, kw_only=True)
class GrowingChain:
    """The chain of one request.

    Attributes:
        cache: of the draft, for the request.
        tip: id of the node below which it grows.
        first_id: id of its first node.
        position: of the tip.
        length: tokens to draft.
        draws: float64[length], the target's draws of its tokens; empty where nothing reads them.
        tokens: drafted so far.
        logprobs: theirs, where they are known with the token.
        logits_rows: rows of their logits among those of all passes.
        entered: rows of all its tokens but the last; None before the first of them is computed.
    """

    cache: TreeCache
    tip: int
    first_id: int
    position: int
    length: int
    draws: FloatArray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    entered: Rows | None = None

    def grows(self, max_positions: int) -> bool:
        """Whether a pass over the last token follows."""
        num = len(self.tokens)
        return num < self.length and self.position + num < max_positions

    def rows(self, max_positions: int) -> Rows:
        """The last token's row; all rows of the chain enter the cache's index with the first."""
        if self.entered is None:
            num = min(self.length, max_positions - self.position) - 1
            steps = np.arange(num)
            parent_ids = steps + (self.first_id - 1)
            parent_ids[0] = self.tip
            self.entered = self.cache.rows(
                node_ids=steps + self.first_id,
                node_tokens=steps,  # unknown yet
                parent_ids=parent_ids,
                node_positions=steps + (self.position + 1),
            )
        return self.entered.at(len(self.tokens) - 1, self.tokens[-1])
