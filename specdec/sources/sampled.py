"""Candidates from a draft's logits: requests with one transform together, sampled or not.

Shape letters: W nodes, K candidates, U draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from specdec.device import Probs
from specdec.sampling.candidates import drawn, sibling_draws
from specdec.sampling.transform import SamplingTransform
from specdec.types import Candidates, IntArray, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState

Histories = Sequence[IntArray] | None
Propose = Callable[[Nodes, Tensor, SamplingTransform, Histories], Candidates]


def by_transform(
    state: DecodeState,
    nodes: Nodes,
    transforms: Sequence[SamplingTransform],
    logits: Tensor,
    propose: Propose,
) -> Candidates:
    """Candidates of the nodes of several requests, in one call if all have the same transform.

    Args:
        state: provides the trees.
        nodes: W nodes, one entry per request.
        transforms: of the requests of ``nodes``.
        logits: [W, U].
        propose: (nodes, logits, transform, histories) -> candidates of nodes with one transform;
            ``histories`` are the tokens up to each node, None where the transform needs none.
    """
    transform = transforms[0]
    if any(other is not transform for other in transforms):
        return Candidates.joined(
            [
                by_transform(state, Nodes(((request_id, ids),)), [of], logits[rows], propose)
                for (request_id, ids, rows), of in zip(nodes.packed(), transforms, strict=True)
            ]
        )
    histories = None
    if transform.params.needs_history:
        requests = [(state.requests[request_id], ids) for request_id, ids in nodes.items]
        histories = [r.path_tokens(s) for r, ids in requests for s in r.tree.slots(ids).tolist()]
    return propose(nodes, logits, transform, histories)


def sampled_candidates(state: DecodeState, nodes: Nodes, probs: Probs, k: int) -> Candidates:
    """Up to ``k`` different children per node, drawn in turn without replacement.

    The draw of sibling j of a node at position p has the key (prompt, p + 1, DRAFT, j). It does not
    depend on the order in which nodes are expanded, and differs from the draws of acceptance tests.

    Args:
        state: provides the keyed draws and the trees.
        nodes: W nodes.
        probs: float64[W, V], the draft's distribution after each; returned as ``probs``.
        k: maximum number of candidates per node.
    """
    k = min(k, probs.shape[1])
    uniforms = np.empty((len(probs), k))
    for request_id, ids, rows in nodes.packed():
        tree = state.requests[request_id].tree
        positions = tree.positions[tree.slots(ids)]
        uniforms[rows] = sibling_draws(state.draws, request_id, positions, k)
    return drawn(probs, k, uniforms)
