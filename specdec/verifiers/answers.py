"""What every verifier starts with and ends with: answers mapped to the tree, paths to verdicts.

Shape letters: A answered nodes, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from specdec.device import on_host
from specdec.state import DecodeState, RequestState
from specdec.types import NO_NODE, Answers, FloatArray, IntArray, Output, Verdict


@dataclass(frozen=True, slots=True)
class RootAnswered:
    """A request whose root was answered, with its answers by slot.

    Attributes:
        request: the request.
        answers: as they came; may hold nodes that have left the tree, which ``rows`` leaves out.
        rows: int64[N], row of ``answers`` for each slot, -1 where the node was not answered now.
    """

    request: RequestState
    answers: Answers
    rows: IntArray

    def token(self, slot: int) -> int:
        """The target's own next token after an answered slot."""
        return int(self.answers.tokens[self.rows[slot]])

    def probs(self, slot: int) -> FloatArray:
        """float64[V]: the target's distribution after an answered slot."""
        assert self.answers.probs is not None, "the verifier declared that it needs target_probs"
        return on_host(self.answers.probs[int(self.rows[slot])])


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rule decides at one answered node.

    Attributes:
        child: slot of the chosen child, ``NO_NODE`` where none was accepted.
        token: the token after the node: the child's, or the correction or bonus token.
        num_rejected: children that were judged and rejected.
    """

    child: int
    token: int
    num_rejected: int


def record_answers(state: DecodeState, output: Output) -> Iterator[RootAnswered]:
    """Marks answered nodes in the trees; yields the requests whose root is among them.

    Answers for closed requests and for nodes that were pruned meanwhile are passed over.
    """
    for answers in output.answers:
        request = state.requests.get(answers.request)
        if request is None:
            continue
        tree = request.tree
        slots = tree.slots(answers.node_ids)
        rows = np.full(len(tree) + 1, -1)  # the last entry takes the rows of pruned nodes
        rows[slots] = np.arange(len(slots))
        rows = rows[:-1]
        tree.answered[:] |= rows >= 0
        if rows[0] >= 0:
            yield RootAnswered(request, answers, rows)


def follow(answered: RootAnswered, rule: Callable[[int], Choice]) -> Verdict:
    """Walks down from the root by ``rule`` as long as the chosen nodes are answered.

    A child that carries the rule's token is followed also where the rule did not choose it: it
    becomes the next root either way, and a root that was answered already would not be again.
    """
    tree = answered.request.tree
    slot, path = 0, []
    while True:
        choice = rule(slot)
        child = choice.child
        if child == NO_NODE:
            child = tree.child(slot, choice.token)
        if child == NO_NODE or answered.rows[child] < 0:
            break
        path.append(child)
        slot = child
    return Verdict(
        request=answered.request.id,
        accepted_ids=tree.ids[np.array(path, np.int64)],
        next_token=choice.token,
        num_verified=len(path) + choice.num_rejected,
    )
