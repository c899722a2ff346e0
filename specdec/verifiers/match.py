"""Token-exact verification: follow the target's own tokens as far as the tree contains them."""

from __future__ import annotations

import numpy as np

from specdec.state import DecodeState
from specdec.types import NO_NODE, Lossless, Needs, Output, Verdict
from specdec.verifiers.answers import RootAnswered, record_answers


class MatchVerifier:
    """Accepts a draft token if it equals the target's own next token.

    The answer at a node is the token that plain decoding would draw there: from the same logits
    (the node attends to its path only) and with the same keyed draw, or the argmax if greedy. The
    output therefore equals autoregressive decoding with the same seed, token for token. This is the
    rule of SpecPipe and PipeDec, of PPSD Alg. 1, line 4, and for greedy decoding of every paper.

    In a pipeline with one level per step only the root is answered: no token is accepted, the
    answer is the next token, and the child with that token becomes the root (a hit).
    """

    needs = Needs()
    lossless = Lossless.TOKEN

    def verify(self, state: DecodeState, output: Output) -> list[Verdict]:
        """One verdict per request whose root was answered."""
        return [_verdict(answered) for answered in record_answers(state, output)]


def _verdict(answered: RootAnswered) -> Verdict:
    tree, rows, answers = answered.request.tree, answered.rows, answered.answers
    parents = tree.parents
    # Siblings differ, so an answered node has at most one matching child. Matches of the root and
    # of children of unanswered nodes (row -1) are accidental; the walk never reaches their parents.
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
