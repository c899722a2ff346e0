"""A source whose candidates are cached per node.

Shape letters: W nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.interfaces import TokenSource
from specdec.sources.candidate_cache import CandidateCache
from specdec.types import Candidates, Commit, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class CachedSource(TokenSource):
    """Wraps a source so that a live node is expanded only once, however often it is requested.

    Policies do not need this, since the token tree stores candidates; a staged source requests the
    same guesses whenever they are close to the nodes that its draft computes. Rows of count 0 are
    not cached: the source may have a proposal later.
    """

    def __init__(self, *, source: TokenSource) -> None:
        """Wraps ``source``, which must not be used elsewhere."""
        self.needs = source.needs
        self.vocab_size = source.vocab_size
        self.counters = source.counters
        self.gives_probs = source.gives_probs
        self._source = source
        self._cache = CandidateCache()
        self._k = 1

    def open(self, request: RequestState) -> None:
        """Starts a request."""
        self._cache.open(request.id)
        self._source.open(request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Cached rows, and the source's candidates for all other nodes in one call."""
        if k > self._k:
            self._k = k
            self._cache.clear()
        missing = self._cache.missing(nodes)
        if not missing.items:
            return self._cache.recall(nodes, k)
        candidates = self._source.expand(state, missing, self._k)
        self._cache.keep(missing, candidates)
        if len(missing) == len(nodes) and candidates.tokens.shape[1] <= k:
            return candidates
        return self._cache.recall(nodes, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Drops the rows of retired and pruned nodes."""
        self._cache.commit(commits)
        self._source.commit(commits, output)

    def close(self, request_id: int) -> None:
        """Drops the request."""
        self._cache.close(request_id)
        self._source.close(request_id)
