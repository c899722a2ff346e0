"""The lossless rule: follow the target's own tokens as far as the tree carries them."""

from __future__ import annotations

import numpy as np

from specdec.state import DecodeState
from specdec.types import NO_NODE, Lossless, Needs, Output, Verdict
from specdec.verifiers.answers import RootAnswered, record_answers


class MatchVerifier:
    """Accepts a draft token where it equals the target's own next token.

    The answer at a node is the token that plain decoding would draw there: by the same logits (the
    node sees its path only) and the same keyed draw, or the argmax if greedy. So the output is that
    of autoregressive decoding with the same seed, token for token. This is SpecPipe's
    and PipeDec's rule, Alg. 1 line 4 of PPSD, and for greedy decoding that of every paper here.

    In a level-per-step pipeline only the root is answered: nothing is accepted, the answer is the
    next token, and a child that carries it becomes the root (a hit).
    """

    needs = Needs()
    lossless = Lossless.TOKEN

    def verify(self, state: DecodeState, output: Output) -> list[Verdict]:
        """One verdict per request whose root was answered."""
        return [_verdict(answered) for answered in record_answers(state, output)]


def _verdict(answered: RootAnswered) -> Verdict:
    tree, rows, answers = answered.request.tree, answered.rows, answered.answers
    parents = tree.parents
    # Siblings differ, so an answered node has at most one matching child. The root, and children of
    # nodes that were not answered, may match by accident: the walk does not come to their parents.
    hits = np.flatnonzero(tree.tokens == answers.tokens[rows[parents]])
    next_of = dict(zip(parents[hits].tolist(), hits.tolist(), strict=True))
    slot, path = 0, []
    while (child := next_of.get(slot, NO_NODE)) != NO_NODE and rows[child] >= 0:
        path.append(child)
        slot = child
    num_rejected = int(np.count_nonzero(parents == slot)) - (child != NO_NODE)
    return Verdict(
        request=answered.request.id,
        accepted_ids=tree.ids[np.array(path, np.int64)],
        next_token=answered.token(slot),
        num_verified=len(path) + num_rejected,
    )
