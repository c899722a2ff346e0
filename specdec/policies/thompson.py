"""A chain whose length is drawn from what was accepted so far (Thompson sampling).

EESD's controller (Liu et al. 2024, arXiv 2406.03853) treats "draft on or stop" as a bandit of two
arms with a Beta posterior. PPSD cites it as "EESD w. TS" and states no detail; this is our reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.parts.fields import DraftCount, validated
from specdec.policies.chain import grow_chains
from specdec.policies.tree_growth import Stateless, ready_requests, unsubmitted
from specdec.sources.hashing import hash_uniform
from specdec.types import Commit, CommitKind, Nodes, Output

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState

_STREAM = 0x75


class ThompsonChain(Stateless):
    """A chain that is stopped before a draft token which, by a sampled belief, would be rejected.

    Per request, the belief about the chance that a draft token is accepted is Beta(1 + accepted,
    1 + rejected). Before each draft token one chance is sampled from it, and a coin of that chance
    decides whether to go on. Neither looks at the candidates, so rejection verifiers stay unbiased.
    """

    value_dependent = False
    serial = True

    @validated
    def __init__(
        self,
        *,
        max_gamma: DraftCount = 10,
        seed: int = 0,
    ) -> None:
        """Sets the bounds.

        Args:
            max_gamma: draft tokens per target pass at most; at least one is drafted.
            seed: keys the controller's draws, apart from those of tokens.

        Raises:
            ValueError: for a length below 1.
        """
        self.max_gamma = max_gamma
        self._seed = seed
        self._seen: dict[int, list[int]] = {}
        self._asked: dict[int, int] = {}

    def open(self, request: RequestState) -> None:
        """Starts from the uniform belief."""
        self._seen[request.id] = [0, 0]

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        return 1 + self.max_gamma

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Draws each idle request's length, grows its chain and submits all of it."""
        requests = ready_requests(state, serial=True)
        lengths = [self._length(request.id, request.prefix_len) for request in requests]
        grow_chains(state, source, list(zip(requests, lengths, strict=True)))
        for request in requests:
            self._asked[request.id] = len(request.tree) - 1
        return unsubmitted(requests)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Counts accepted draft tokens, and the one that ended the path where one did."""
        for commit in commits:
            asked = self._asked.pop(commit.request, None)
            if asked is None or commit.kind is CommitKind.NONE:
                continue
            accepted = len(commit.retired_ids) - 1
            seen = self._seen[commit.request]
            seen[0] += accepted
            seen[1] += accepted < asked

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._seen.pop(request_id, None)
        self._asked.pop(request_id, None)

    def _length(self, request_id: int, position: int) -> int:
        """Draft tokens for a root at ``position``: coins of sampled chances until one fails."""
        accepted, rejected = self._seen[request_id]
        places = np.arange(1, self.max_gamma)
        bits = hash_uniform(self._seed, _STREAM, request_id, position)
        rng = np.random.default_rng(int(float(bits) * 2**53))
        chances = rng.beta(1 + accepted, 1 + rejected, len(places))
        coins = hash_uniform(self._seed, _STREAM + 1, request_id, position, places)
        failed = np.flatnonzero(coins >= chances)
        return 1 + (int(failed[0]) if len(failed) else len(places))
