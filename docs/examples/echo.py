"""A source outside the library: proposes the token that followed last time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from specdec.interfaces import TokenSource
from specdec.parts.fields import PositiveShare, validated
from specdec.state import DecodeState, RequestState
from specdec.types import Candidates, Commit, Nodes, Output


class Echo(TokenSource):
    """Stores, per request, the last follower of each token, and proposes it."""

    @validated
    def __init__(self, *, trust: PositiveShare) -> None:
        """Takes the keys of its YAML.

        Args:
            trust: draft probability of its proposals.
        """
        self._logprob = math.log(trust)
        self._requests: dict[int, RequestState] = {}
        self._followers: dict[int, dict[int, int]] = {}

    def open(self, request: RequestState) -> None:
        """Reads the prompt."""
        self._requests[request.id] = request
        self._followers[request.id] = dict(pairwise(request.tokens.tolist()))

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """One candidate for each node whose token has a follower; none for the others."""
        candidates = Candidates.empty(len(nodes), k)
        row = 0
        for request_id, ids in nodes.items:
            tree, followers = self._requests[request_id].tree, self._followers[request_id]
            for token in tree.tokens[tree.slots(ids)].tolist():
                if token in followers:
                    candidates.tokens[row, 0] = followers[token]
                    candidates.logprobs[row, 0] = self._logprob
                    candidates.counts[row] = 1
                row += 1
        return candidates

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Reads the decided tokens: the old root, the accepted tokens and the next one."""
        for commit in commits:
            if commit.request in self._followers:
                decided = [*commit.retired_tokens.tolist(), commit.next_token]
                self._followers[commit.request].update(pairwise(decided))

    def close(self, request_id: int) -> None:
        """Releases the request's state."""
        self._requests.pop(request_id, None)
        self._followers.pop(request_id, None)
