"""Steps that verifiers share: map answers to tree nodes, walk the tree, build the verdict.

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
    """A request whose root was answered in this step, with the answers by slot.

    Attributes:
        request: the request.
        answers: the executor's answers; may include nodes that were pruned meanwhile.
        rows: int64[N], row of ``answers`` for each slot; -1 for nodes not answered in this step.
    """

    request: RequestState
    answers: Answers
    rows: IntArray

    def token(self, slot: int) -> int:
        """The target's own next token after an answered slot."""
        return int(self.answers.tokens[self.rows[slot]])

    def probs(self, slot: int) -> FloatArray:
        """float64[V]: the target's distribution after an answered slot."""
        assert self.answers.probs is not None, "required by needs.target_probs"
        return on_host(self.answers.probs[int(self.rows[slot])])


@dataclass(frozen=True, slots=True)
class Choice:
    """An acceptance rule's decision at one answered node.

    Attributes:
        child: slot of the accepted child; ``NO_NODE`` if none was accepted.
        token: the token after the node: the child's, or the correction or bonus token.
        num_rejected: number of children that were judged and rejected.
    """

    child: int
    token: int
    num_rejected: int


def record_answers(state: DecodeState, output: Output) -> Iterator[RootAnswered]:
    """Marks answered nodes in the trees; yields the requests whose root was answered.

    Answers of closed requests and of pruned nodes are ignored.
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
    """Builds the verdict by applying ``rule`` from the root down, as far as nodes are answered.

    Args:
        answered: a request whose root was answered.
        rule: slot of an answered node -> the decision there.

    Returns:
        The verdict. If the rule accepts no child but a child has the rule's token, the walk
        continues with that child: it becomes the next root in any case, and a root that is already
        answered would never be answered again.
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


def accept_child(
    answered: RootAnswered, choose: Callable[[RootAnswered, int, IntArray], int]
) -> Callable[[int], Choice]:
    """An acceptance rule: the child that ``choose`` returns, or else the target's own token."""
    tree = answered.request.tree

    def rule(slot: int) -> Choice:
        children = tree.children(slot)
        child = choose(answered, slot, children) if len(children) else NO_NODE
        token = answered.token(slot) if child == NO_NODE else int(tree.tokens[child])
        accepted = child != NO_NODE or bool((tree.tokens[children] == token).any())
        return Choice(child, token, len(children) - accepted)

    return rule
