from collections.abc import Sequence

import numpy as np

from specdec.interfaces import Verifier
from specdec.state import DecodeState, RequestState
from specdec.types import NO_NODE, IntArray, Lossless, Verdict

_NO_IDS: IntArray = np.zeros(0, np.int64)


class MatchVerifier(Verifier):
    """Accepts a draft token if it equals the target's own next token.

    The answer at a node is the token that plain decoding would draw there: from the same logits and
    with the same keyed draw, or the argmax if greedy. The output therefore equals autoregressive
    decoding with the same seed. This is the rule of SpecPipe and PipeDec, of PPSD Alg. 1, line 4,
    and of every paper for greedy decoding. With one level per step only the root is answered: the
    child with that token becomes the root (a hit).
    """

    lossless = Lossless.TOKEN

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        return [_verdict(request) for request in requests]


def _verdict(request: RequestState) -> Verdict:
    tree = request.tree
    if len(tree) == 1:
        return Verdict(request=request.id, accepted_ids=_NO_IDS, next_token=int(tree.answers[0]))
    answers, parents = tree.answers, tree.parents
    # Siblings differ, so an answered node has at most one matching child. A match of the root is
    # accidental: its parent is not a slot, and the walk never reaches it.
    hits = (tree.tokens == answers.take(parents, mode="wrap")).nonzero()[0]
    next_of = dict(zip(parents[hits].tolist(), hits.tolist(), strict=True))
    slot, path = 0, []
    while (child := next_of.get(slot, NO_NODE)) != NO_NODE and tree.answered[child]:
        path.append(child)
        slot = child
    num_rejected = int(np.count_nonzero(parents == slot)) - (child != NO_NODE)
    return Verdict(
        request=request.id,
        accepted_ids=tree.ids[np.array(path, np.int64)],
        next_token=int(answers[slot]),
        num_verified=len(path) + num_rejected,
    )
