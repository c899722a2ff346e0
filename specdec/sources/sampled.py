import numpy as np

from specdec.device import Probs
from specdec.sampling.transform import drawn, sibling_draws
from specdec.state import DecodeState
from specdec.types import Candidates, Nodes


def sampled_candidates(state: DecodeState, nodes: Nodes, probs: Probs, k: int) -> Candidates:
    """Samples up to ``k`` different children of each node from its row of ``probs``, float64[W, V].

    They are drawn one after the other without replacement. The random number for child j of a node
    at position p depends only on seed, prompt, p + 1, ``Purpose.DRAFT`` and j: not on the order in
    which nodes are expanded. Acceptance tests use other, independent numbers.
    """
    k = min(k, probs.shape[1])
    uniforms = []
    for request_id, ids in nodes.items:
        tree = state.requests[request_id].tree
        positions = tree.positions[tree.slots(ids)]
        uniforms.append(sibling_draws(state.draws, request_id, positions, k))
    return drawn(probs, k, np.concatenate(uniforms))
