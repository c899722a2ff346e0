"""Candidates sampled from a draft distribution by keyed draws, for rejection verifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.randomness import Purpose
from specdec.sampling import sample_candidates
from specdec.types import Candidates, FloatArray, IntArray, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState


def node_positions(state: DecodeState, nodes: Nodes) -> IntArray:
    """int64[W]: absolute positions, in packed order."""
    parts = []
    for request_id, ids in nodes.items:
        tree = state.requests[request_id].tree
        parts.append(tree.positions[tree.slots(ids)])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def sampled_candidates(state: DecodeState, nodes: Nodes, probs: FloatArray, k: int) -> Candidates:
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
    siblings = np.arange(k)
    start = 0
    for request_id, ids in nodes.items:
        tree = state.requests[request_id].tree
        positions = tree.positions[tree.slots(ids)] + 1
        stop = start + len(ids)
        uniforms[start:stop] = state.draws.uniform(
            request_id, positions[:, None], Purpose.DRAFT, siblings
        )
        start = stop
    tokens, logprobs, counts = sample_candidates(probs, k, uniforms)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts, probs=probs)
