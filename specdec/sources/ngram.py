"""Proposals of a Katz back-off n-gram model (the draft2 of Staged Speculative Decoding, 3.2).

Shape letters: W nodes, K candidates, V vocabulary, L context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.sources.contexts import tails
from specdec.sources.katz import KatzModel
from specdec.sources.sampled import sampled_candidates
from specdec.types import (
    Candidates,
    Commit,
    FloatArray,
    IntArray,
    Needs,
    Nodes,
    Output,
    SourceCounters,
)

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

_MEMORY = 1 << 16  # contexts whose answers are kept before all are forgotten

_Known = dict[tuple[int, ...], tuple[IntArray, FloatArray, int]]
"""Context -> (tokens, log probabilities, valid entries) of its best continuations."""


class NGramSource:
    """Answers every node from its last ``order - 1`` tokens; holds nothing per request.

    Text repeats its contexts: answers are kept by context, since looking one up costs a few
    microseconds and working it out a hundred.

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
        self._known: dict[int, _Known] = {}

    def open(self, request: RequestState) -> None:
        """Nothing to prepare."""

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """The ``k`` most probable continuations of each node, or ``k`` sampled ones."""
        length = self.katz.order - 1
        contexts: list[tuple[int, ...]] = []
        for request_id, ids in nodes.items:
            request = state.requests[request_id]
            contexts += tails(request, request.tree.slots(ids).tolist(), length)
        if self.gives_probs:
            return sampled_candidates(state, nodes, self.katz.probs(self._windows(contexts)), k)
        known = self._known.setdefault(k, {})
        if len(known) > _MEMORY:
            known.clear()
        rows = [known.get(context) for context in contexts]
        if None in rows:
            self._learn(known, [c for c, row in zip(contexts, rows, strict=True) if row is None], k)
            rows = [known[context] for context in contexts]
        tokens, logprobs, counts = zip(*rows, strict=True)  # type: ignore[misc]
        return Candidates(
            tokens=np.stack(tokens), logprobs=np.stack(logprobs), counts=np.array(counts)
        )

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Nothing to follow."""

    def close(self, request_id: int) -> None:
        """Nothing to forget."""

    def _learn(self, known: _Known, contexts: list[tuple[int, ...]], k: int) -> None:
        """Works out the best continuations of contexts that are not known."""
        windows = self._windows(contexts)
        tokens, logprobs = self.katz.top(windows, min(k, self.katz.vocab_size))
        counts = (logprobs > -np.inf).sum(axis=1)  # a context after which all V tokens were seen
        for i, context in enumerate(contexts):
            known[context] = (tokens[i], logprobs[i], int(counts[i]))

    def _windows(self, contexts: list[tuple[int, ...]]) -> IntArray:
        """int64[W, L]."""
        return np.array(contexts, np.int64).reshape(len(contexts), self.katz.order - 1)
