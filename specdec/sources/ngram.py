"""Proposals of a Katz back-off n-gram model (the draft2 of Staged Speculative Decoding, 3.2).

Shape letters: W nodes, K candidates, V vocabulary, L context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.sources.contexts import recent_tokens
from specdec.sources.katz import KatzModel
from specdec.sources.sampled import sampled_candidates
from specdec.types import Candidates, Commit, IntArray, Needs, Nodes, Output, SourceCounters

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class NGramSource:
    """Answers every node from its last ``order - 1`` tokens; holds nothing per request.

    Attributes:
        katz: the model.
        gives_probs: whether candidates are sampled and come with their whole distribution.
    """

    needs = Needs()

    def __init__(self, *, katz: KatzModel, sample: bool = False) -> None:
        """Wraps a model.

        Args:
            katz: counted from text or from a draft's samples.
            sample: sample candidates by keyed draws and give the distribution (for verifiers that
                need ``draft_probs``) instead of taking the most probable.
        """
        self.katz = katz
        self.gives_probs = sample
        self.vocab_size: int | None = katz.vocab_size
        self.counters = SourceCounters()

    def open(self, request: RequestState) -> None:
        """Nothing to prepare."""

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """The ``k`` most probable continuations of each node, or ``k`` sampled ones."""
        contexts = self._contexts(state, nodes)
        if self.gives_probs:
            return sampled_candidates(state, nodes, self.katz.probs(contexts), k)
        tokens, logprobs = self.katz.top(contexts, min(k, self.katz.vocab_size))
        counts = (logprobs > -np.inf).sum(axis=1)  # a context after which all V tokens were seen
        return Candidates(tokens=tokens, logprobs=logprobs, counts=counts)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Nothing to follow."""

    def close(self, request_id: int) -> None:
        """Nothing to forget."""

    def _contexts(self, state: DecodeState, nodes: Nodes) -> IntArray:
        """int64[W, L]."""
        length = self.katz.order - 1
        parts = []
        for request_id, ids in nodes.items:
            request = state.requests[request_id]
            parts.append(recent_tokens(request, request.tree.slots(ids), length))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
