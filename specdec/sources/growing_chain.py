"""A chain that a draft model grows token by token, outside the tree (``TokenSource.chains``)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.device import Probs
from specdec.types import Chain, FloatArray


@dataclass(slots=True, kw_only=True)
class GrowingChain:
    """The chain of one request.

    Attributes:
        cache: of the draft, for the request.
        tip: id of the node below which it grows.
        first_id: id of its first node.
        position: of the tip.
        length: tokens to draft.
        draws: float64[length], by which its tokens are chosen: the target's, or the draft's own;
            empty where none are.
        tokens: drafted so far.
        logprobs: theirs, where they are known with the token.
        logits_rows: rows of their logits among those of all passes.
        probs: the distributions that they were sampled from; empty where they were not.
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
    probs: list[Probs] = field(default_factory=list)

    def grows(self, max_positions: int) -> bool:
        """Whether a pass over the last token follows."""
        num = len(self.tokens)
        return num < self.length and self.position + num < max_positions

    def chain(self) -> Chain:
        """The chain, all of whose tokens have their log-probabilities."""
        tokens, logprobs = np.array(self.tokens, np.int64), np.array(self.logprobs)
        return Chain(tokens=tokens, logprobs=logprobs, probs=self.probs or None)

    def rows(self) -> Rows:
        """The last token's row."""
        num = len(self.tokens)
        node_id = self.first_id + num - 1
        parent_id = node_id - 1 if num > 1 else self.tip
        row = np.array([[node_id], [self.tokens[-1]], [parent_id], [self.position + num]])
        return self.cache.rows(
            node_ids=row[0], node_tokens=row[1], parent_ids=row[2], node_positions=row[3]
        )
