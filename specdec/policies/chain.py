from collections.abc import Sequence

import numpy as np

from specdec.interfaces import TokenSource, TreePolicy
from specdec.parts.fields import DraftCount, validated
from specdec.policies.tree_growth import (
    expand,
    last_position,
    ready_requests,
    take_first,
    unsubmitted,
)
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import Nodes


class Chain(TreePolicy):
    """Grows a chain of ``gamma`` draft tokens below the root and submits it whole.

    Leviathan et al. 2023, Alg. 1; Chen et al. 2023, Alg. 2 (gamma is Leviathan's symbol). Each
    node's first candidate is taken: the most probable one, or the sampled one if the verifier needs
    sampled candidates. A chain that survives a commit is extended.
    """

    value_dependent = False

    @validated
    def __init__(self, *, gamma: DraftCount) -> None:
        self.gamma = self.chain_length = gamma

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.gamma

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=True)
        grow_chains(state, source, [(request, self.gamma) for request in requests])
        return unsubmitted(requests)


def grow_chains(
    state: DecodeState,
    source: TokenSource,
    lengths: Sequence[tuple[RequestState, int]],
    children: int = 1,
) -> None:
    """Grows a chain of first candidates below each root in ``lengths``, pairs (request, number of
    tokens below the root). One source call per token extends all chains and requests ``children``
    candidates per node. A chain ends at ``last_position`` at the latest.
    """
    growing = []
    for request, gamma in lengths:
        path = first_path(request.tree)
        room = last_position(request) - request.prefix_len
        growing.append((request, min(gamma, room) + 1 - len(path), np.array(path[-1:])))
    while growing := [entry for entry in growing if entry[1] > 0]:
        expand(state, source, [(request, tail) for request, _, tail in growing], children)
        longer = [(r, missing - 1, take_first(r.tree, tail, 1)) for r, missing, tail in growing]
        growing = [entry for entry in longer if len(entry[2])]


def first_path(tree: TokenTree) -> list[int]:
    path = [0]
    while len(tree) > 1 and len(children := tree.children(path[-1])):
        path.append(int(children[0]))
    return path


class RootOnly(TreePolicy):
    """Submits each root once and never calls the source (autoregressive decoding, ``ar``)."""

    value_dependent = False

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        return unsubmitted(ready_requests(state, serial=True))
