"""A single draft path per target pass (Leviathan et al. 2023, Alg. 1; Chen et al. 2023, Alg. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.parts.fields import DraftCount, validated
from specdec.policies.tree_growth import (
    NO_SLOTS,
    Stateless,
    expand,
    last_position,
    ready_requests,
    unsubmitted,
)
from specdec.tree import TokenTree
from specdec.types import IntArray, Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState


class Chain(Stateless):
    """Grows a chain of ``gamma`` draft tokens under the root and submits it whole.

    Each node's first candidate is taken: the most probable one, or the sampled one where the
    verifier needs sampled candidates. A chain that survives a commit is gone on from.
    ``gamma`` is the papers' name for ``num_draft_tokens``.
    """

    value_dependent = False
    serial = True

    @validated
    def __init__(self, *, gamma: DraftCount) -> None:
        """Sets the length.

        Args:
            gamma: draft tokens per target pass, at least 1.

        Raises:
            ValueError: for a length below 1.
        """
        self.gamma = gamma

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        return 1 + self.gamma

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Grows every idle request's chain, one source call per token, and submits all of it."""
        requests = ready_requests(state, serial=True)
        grow_chains(state, source, [(request, self.gamma) for request in requests])
        return unsubmitted(requests)


def grow_chains(
    state: DecodeState, source: TokenSource, wanted: Sequence[tuple[RequestState, int]]
) -> None:
    """Grows a chain of first candidates under each root, one source call per token.

    Args:
        state: the forest.
        source: asked for one packed batch of chain ends at a time.
        wanted: (request, length that its chain is to have); shorter near the request's end.
    """
    growing = []
    for request, gamma in wanted:
        length, tail = _first_path(request.tree)
        room = last_position(request) - int(request.tree.positions[0])
        growing.append((request, min(gamma, room) - length, tail))
    while growing := [entry for entry in growing if entry[1] > 0]:
        fresh = [(r, tail[~r.tree.expanded[tail]]) for r, _, tail in growing]
        expand(state, source, fresh, 1)
        longer = []
        for request, left, tail in growing:
            tail = _take_first(request.tree, tail)
            if len(tail):
                longer.append((request, left - 1, tail))
        growing = longer


def _first_path(tree: TokenTree) -> tuple[int, IntArray]:
    """(length, int64[1] tail slot) of the path along first children that survives in the tree."""
    slot, length = 0, 0
    while len(tree) > 1 and len(children := tree.children(slot)):
        slot, length = int(children[0]), length + 1
    return length, np.array([slot])


def _take_first(tree: TokenTree, tail: IntArray) -> IntArray:
    """int64[0 or 1]: the node made of the tail's first candidate that is left."""
    left = np.flatnonzero(tree.candidate_logprobs[tail[0]] > -np.inf)
    return tree.take(tail, left[:1]) if len(left) else NO_SLOTS
