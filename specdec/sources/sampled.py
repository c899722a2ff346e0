import numpy as np

from specdec.device import Probs
from specdec.sampling.transform import drawn, sibling_draws
from specdec.state import DecodeState
from specdec.types import Candidates, Nodes


def sampled_candidates(state: DecodeState, nodes: Nodes, probs: Probs, k: int) -> Candidates:
    """Samples up to ``k`` different children per node from ``probs``, float64[W, V].

    They are drawn in turn without replacement. The draw of sibling j of a node at position p has
    the key (prompt, p + 1, DRAFT, j). It does not depend on the order in which nodes are expanded,
    and differs from the draws of acceptance tests.
    """
    k = min(k, probs.shape[1])
    uniforms = []
    for request_id, ids in nodes.items:
        tree = state.requests[request_id].tree
        positions = tree.positions[tree.slots(ids)]
        uniforms.append(sibling_draws(state.draws, request_id, positions, k))
    return drawn(probs, k, np.concatenate(uniforms))
