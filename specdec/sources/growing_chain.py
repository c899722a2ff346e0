"""Chains that a draft model grows token by token, outside the tree (``TokenSource.chains``).

Shape letters: V vocabulary, W nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.attention.kv_cache import EMPTY, Rows, TreeCache
from specdec.device import Probs
from specdec.models.onnx_choices import MAX_KEPT, Best, Choice, Drawn
from specdec.sampling.candidates import drawn_firsts
from specdec.sampling.transform import SamplingTransform
from specdec.sources.near_draw import NearDraw
from specdec.types import Chain, FloatArray, IntArray


@dataclass(slots=True, kw_only=True)
class GrowingChain:
    """The chain of one request.

    Attributes:
        cache: of the draft, for the request.
        tip: id of the node below which it grows.
        tip_token, tip_parent: the tip's token and the id of its parent.
        first_id: id of its first node.
        position: of the tip.
        length: tokens to draft.
        draws: float64[length], by which its tokens are chosen: the target's, or the draft's own;
            empty where none are.
        prefix: committed tokens that the cache lacks when it starts; None where it lacks other
            nodes than the tip, or has the tip.
        tokens: drafted so far.
        logprobs: theirs, where they are known with the token.
        logits_rows: rows of their logits among those of all passes.
        probs: the distributions that they were sampled from; empty where they were not.
    """

    cache: TreeCache
    tip: int
    tip_token: int
    tip_parent: int
    first_id: int
    position: int
    length: int
    draws: FloatArray
    prefix: IntArray | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    probs: list[Probs] = field(default_factory=list)

    def missing(self, max_positions: int) -> int:
        """How many tokens are still to be drafted, which the model's positions may limit."""
        return min(self.length, max_positions - self.position) - len(self.tokens)

    @property
    def sees_all(self) -> bool:
        """Whether the last token's row, which follows, sees all that is in the cache.

        It does if the tree region is one path, that to the token's parent.
        """
        depth = self.position + len(self.tokens) - self.cache.cached_len
        if not self.tokens and self.prefix is not None:
            depth -= len(self.prefix)  # they enter the cache before the tip
        return self.cache.num_nodes == depth

    def chain(self) -> Chain:
        """The chain, all of whose tokens have their log-probabilities."""
        tokens, logprobs = np.array(self.tokens, np.int64), np.array(self.logprobs)
        return Chain(tokens=tokens, logprobs=logprobs, probs=self.probs or None)

    def rows(self, num: int = 1, prefix: IntArray = EMPTY) -> Rows:
        """Rows for ``prefix``, the last token (at first the tip), and ``num`` - 1 that follow."""
        steps, known = np.arange(num), len(self.tokens)
        ids = steps + (self.first_id + known - 1)
        parents, tokens = ids - 1, np.zeros(num, np.int64)
        tokens[0] = self.tokens[-1] if known else self.tip_token
        if not known:
            ids[0], parents[0] = self.tip, self.tip_parent
        if known < 2:
            parents[1 - known : 2 - known] = self.tip  # the first token's, if it has a row
        return self.cache.rows(
            prefix_tokens=prefix,
            node_ids=ids,
            node_tokens=tokens,
            parent_ids=parents,
            node_positions=steps + (self.position + known),
        )


class TokenChoice:
    """Chooses the next tokens of chains from the logits of passes.

    With the target's draws, by them (``NearDraw``); when sampled, by the draft's own draws; else
    the most probable ones, whose log-probabilities ``finish`` computes.
    """

    def __init__(
        self, transform: SamplingTransform, *, near: NearDraw | None, sample: bool
    ) -> None:
        """Starts before the first pass.

        Args:
            transform: of all chains.
            near: chooses by the target's draws; None: no target's draws.
            sample: whether the draft's draws choose.
        """
        self._transform, self._near, self._sample = transform, near, sample
        self._num_rows = 0

    def in_graph(self, vocab_size: int) -> Choice | None:
        """The same choice in the draft's graph; None where it has to be made here."""
        params = self._transform.params
        if self._near is not None:
            return None
        if not self._sample:
            return Best(params.temperature or 1.0)
        if params.greedy or not 0 < params.top_k < min(vocab_size, MAX_KEPT + 1):
            return None  # the distributions would have entries for the whole vocabulary
        return Drawn(params.temperature, params.top_k, params.top_p)

    def append(self, chains: Sequence[GrowingChain], logits: Tensor) -> None:
        """Appends a token to every chain, by logits [len(chains), V] of the latest pass."""
        near, transform = self._near, self._transform
        if near is None and not self._sample:
            tokens = transform.greedy(logits).tolist()
        else:
            draws = np.array([chain.draws[len(chain.tokens)] for chain in chains])
            if near is None:
                found = drawn_firsts(transform, logits, draws)
            else:
                found = near.candidates(transform, logits, None, draws, 1)
            tokens = found.tokens[:, 0].tolist()
            for row, chain in enumerate(chains):
                chain.logprobs.append(float(found.logprobs[row, 0]))
                if found.probs is not None:
                    chain.probs.append(found.probs[row])
        for row, (chain, token) in enumerate(zip(chains, tokens, strict=True), self._num_rows):
            chain.tokens.append(token)
            chain.logits_rows.append(row)
        self._num_rows += len(chains)

    def finish(self, chains: Sequence[GrowingChain], passes: Sequence[Tensor]) -> list[Chain]:
        """The chains, with log-probabilities; ``passes``: the logits of all passes."""
        if self._near is None and not self._sample and passes:
            # All at once: the passes take about as long as a call for each.
            scores = self._transform.top(torch.cat(list(passes)), 1)[1][:, 0]
            for chain in chains:
                # Those of tokens without logits here are known; they come after.
                chain.logprobs[:0] = scores[chain.logits_rows].tolist()
        return [chain.chain() for chain in chains]
