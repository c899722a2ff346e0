"""A policy outside the library: a chain that ends when the draft is no longer sure."""

from __future__ import annotations

import math

import numpy as np

from specdec.interfaces import TokenSource, TreePolicy
from specdec.parts.fields import Count, Share, validated
from specdec.policies.tree_growth import (
    expand,
    last_position,
    ready_requests,
    unsubmitted,
)
from specdec.state import DecodeState, RequestState
from specdec.types import Nodes


class Careful(TreePolicy):
    """Drafts token by token while the draft gives its best candidate at least ``min_prob``."""

    value_dependent = True  # it looks at probabilities, so rejection sampling would be biased

    @validated
    def __init__(self, *, gamma: Count, min_prob: Share) -> None:
        """Takes the keys of its YAML.

        Args:
            gamma: draft tokens per target pass at most.
            min_prob: least probability of a token that is drafted.
        """
        self.gamma = gamma
        self.min_prob = min_prob

    def max_cached_nodes(self, in_flight: int) -> int:
        """The root and the chain."""
        return 1 + self.gamma

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Grows the chain of every request that awaits no answer, and submits all of it."""
        requests = ready_requests(state, serial=True)
        growing = requests
        while growing:
            growing = self._one_more(state, source, growing)
        return unsubmitted(requests)

    def _one_more(
        self, state: DecodeState, source: TokenSource, requests: list[RequestState]
    ) -> list[RequestState]:
        """One draft token for each request; returns the requests whose chain may continue."""
        ends = [
            (request, np.array([len(request.tree) - 1]))  # the last node of a chain
            for request in requests
            if len(request.tree) <= self.gamma
            and request.tree.positions[-1] < last_position(request)
        ]
        # The tree keeps candidates: a node is expanded once, however many steps it survives.
        expand(state, source, [(r, end) for r, end in ends if not r.tree.expanded[end[0]]], 1)
        longer = []
        for request, end in ends:
            logprob = request.tree.candidate_logprobs[end[0]].max(initial=-math.inf)
            if logprob > -math.inf and math.exp(logprob) >= self.min_prob:
                request.tree.take(end, np.array([0]))
                longer.append(request)
        return longer
