"""Proposals of a Katz back-off n-gram model (the draft2 of Staged Speculative Decoding, 3.2).

Shape letters: W nodes, K candidates, V vocabulary, L context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.sources.katz import NO_TOKEN, KatzModel
from specdec.sources.sampled import sampled_candidates
from specdec.types import Candidates, FloatArray, IntArray, Nodes

if TYPE_CHECKING:
    from specdec.executors.models import ModelPair
    from specdec.state import DecodeState, RequestState

_MEMORY = 1 << 16  # answers cached per request; the cache is cleared when it is full

_Cache = dict[tuple[int, ...], tuple[IntArray, FloatArray, int]]
"""(k, *context) -> (tokens, log probabilities, valid entries) of its k best continuations."""


class NGramSource(TokenSource):
    """Proposes continuations of each node's last ``order - 1`` tokens.

    Results are cached by context, since text repeats its contexts. The cache belongs to a request,
    so that a second measurement of a prompt starts empty.

    Attributes:
        katz: the model.
        gives_probs: whether candidates are sampled and returned with their distribution.
    """

    def __init__(
        self,
        *,
        katz: KatzModel | None = None,
        pair: ModelPair | None = None,
        sample: bool = False,
    ) -> None:
        """Takes a model, or counts one from a pair's token samples.

        Args:
            katz: the model; None for trigrams of the pair's samples.
            pair: the model pair; not needed with ``katz``.
            sample: sample candidates by keyed draws and return their distribution, for verifiers
                that need ``draft_probs``; false: the most probable candidates.

        Raises:
            UserError: the pair has no token samples.
        """
        if katz is None:
            assert pair is not None, "either katz or pair is required"
            katz = pair.artefact(KatzModel)
        self.katz = katz
        self.gives_probs = sample
        self.vocab_size: int | None = katz.vocab_size
        self.counters = SourceCounters()
        self._cache: dict[int, _Cache] = {}  # by request

    def open(self, request: RequestState) -> None:
        """Starts an empty cache."""
        self._cache[request.id] = {}

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """The ``k`` most probable continuations of each node, or ``k`` sampled ones."""
        for request_id, _ in nodes.items:
            if len(self._cache[request_id]) > _MEMORY:
                self._cache[request_id].clear()
        contexts = [
            (request_id, tail)
            for request_id, ids in nodes.items
            for tail in self._tails(state.requests[request_id], ids)
        ]
        if self.gives_probs:
            windows = self._windows([tail for _, tail in contexts])
            return sampled_candidates(state, nodes, self.katz.probs(windows), k)
        missing = [(i, tail) for i, tail in contexts if (k, *tail) not in self._cache[i]]
        if missing:
            self._compute(missing, k)
        rows = [self._cache[i][k, *tail] for i, tail in contexts]
        tokens, logprobs, counts = zip(*rows, strict=True)
        return Candidates(
            tokens=np.stack(tokens), logprobs=np.stack(logprobs), counts=np.array(counts)
        )

    def close(self, request_id: int) -> None:
        """Removes the request's cache."""
        self._cache.pop(request_id, None)

    def _tails(self, request: RequestState, ids: IntArray) -> list[tuple[int, ...]]:
        return tails(request, request.tree.slots(ids).tolist(), self.katz.order - 1)

    def _compute(self, missing: list[tuple[int, tuple[int, ...]]], k: int) -> None:
        """Fills the caches with the best continuations of missing contexts."""
        windows = self._windows([tail for _, tail in missing])
        tokens, logprobs = self.katz.top(windows, min(k, self.katz.vocab_size))
        counts = (logprobs > -np.inf).sum(axis=1)  # fewer after a context with all V tokens seen
        for row, (request_id, tail) in enumerate(missing):
            self._cache[request_id][k, *tail] = tokens[row], logprobs[row], int(counts[row])

    def _windows(self, contexts: list[tuple[int, ...]]) -> IntArray:
        """int64[W, L]."""
        return np.array(contexts, np.int64).reshape(len(contexts), self.katz.order - 1)


def tails(request: RequestState, slots: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """The last ``length`` tokens up to and including each node, oldest first.

    Args:
        request: its committed tokens and tree are read.
        slots: tree slots.
        length: tokens of each tuple, ``NO_TOKEN`` before the start of the sequence.
    """
    tree, committed = request.tree, request.tokens
    above = [NO_TOKEN] * length + committed[max(0, len(committed) - length) :].tolist()
    tokens, parents = tree.tokens, tree.parents
    contexts = []
    for slot in slots:
        path: list[int] = []
        node = int(slot)
        while node > 0 and len(path) < length:
            path.append(int(tokens[node]))
            node = int(parents[node])
        path.reverse()
        missing = length - len(path)
        contexts.append((*above[len(above) - missing :], *path))
    return contexts
