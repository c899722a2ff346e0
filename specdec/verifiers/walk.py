"""Applies a verifier's rule from a tree's root down. Shape letters: V vocabulary, C children."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdec.device import on_host
from specdec.state import RequestState
from specdec.tree import TokenTree
from specdec.types import NO_NODE, FloatArray, IntArray, Verdict


@dataclass(frozen=True, slots=True)
class Choice:
    """An acceptance rule's decision at one answered node: the accepted ``child`` or ``NO_NODE``,
    the ``token`` that follows the node, and how many children were rejected.
    """

    child: int
    token: int
    num_rejected: int


def target_probs(tree: TokenTree, slot: int) -> FloatArray:
    """Returns float64[V], the target's distribution after the node at an answered slot."""
    return on_host(tree.target_probs[int(tree.ids[slot])])


def follow(request: RequestState, rule: Callable[[int], Choice]) -> Verdict:
    """Builds the verdict by applying ``rule`` (answered slot -> choice) from the root down, as far
    as nodes are answered. If it accepts no child, but a child has the token that it chose and would
    become the next root anyway, the walk continues at that child.
    """
    tree = request.tree
    slot, path = 0, []
    while True:
        choice = rule(slot)
        child = choice.child
        if child == NO_NODE:
            child = tree.child(slot, choice.token)
        if child == NO_NODE or not tree.answered[child]:
            break
        path.append(child)
        slot = child
    return Verdict(
        request=request.id,
        accepted_ids=tree.ids[np.array(path, np.int64)],
        next_token=choice.token,
        num_verified=len(path) + choice.num_rejected,
    )


def follow_children(
    request: RequestState, choose: Callable[[TokenTree, int, IntArray], int]
) -> Verdict:
    """Builds the verdict from ``choose`` (tree, answered slot, its children int64[C >= 1]), which
    returns the accepted child, or ``NO_NODE`` to follow the target's own token.
    """
    tree = request.tree

    def rule(slot: int) -> Choice:
        children = tree.children(slot)
        child = choose(tree, slot, children) if len(children) else NO_NODE
        token = int(tree.answers[slot]) if child == NO_NODE else int(tree.tokens[child])
        accepted = child != NO_NODE or bool((tree.tokens[children] == token).any())
        return Choice(child, token, len(children) - accepted)

    return follow(request, rule)
