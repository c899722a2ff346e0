"""Candidates sampled without replacement from a draft's distributions.

Shape letters: W nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.device import Probs
from specdec.sampling.candidates import drawn, sibling_draws
from specdec.types import Candidates, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState


def sampled_candidates(state: DecodeState, nodes: Nodes, probs: Probs, k: int) -> Candidates:
    """Up to ``k`` different children per node, drawn one after the other without replacement.

    The draw of sibling j of a node at position p is keyed by (prompt, p + 1, DRAFT, j): the same
    for every order in which nodes are asked for, and never that of an acceptance test.

    Args:
        state: holds the draws and the trees.
        nodes: W nodes.
        probs: float64[W, V], the draft's distribution after each; it goes into the answer.
        k: candidates per node.
    """
    k = min(k, probs.shape[1])
    uniforms = np.empty((len(probs), k))
    start = 0
    for request_id, ids in nodes.items:
        tree = state.requests[request_id].tree
        stop = start + len(ids)
        uniforms[start:stop] = sibling_draws(
            state.draws, request_id, tree.positions[tree.slots(ids)], k
        )
        start = stop
    return drawn(probs, k, uniforms)
