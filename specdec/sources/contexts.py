"""The tokens before a node, as the context of an n-gram.

Shape letters: W nodes, L tokens of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.state import RequestState

NO_TOKEN = -1
"""Placeholder for tokens before the start of the sequence."""


def tails(request: RequestState, slots: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """The last ``length`` tokens up to and including each node, oldest first.

    Args:
        request: its committed tokens and tree are read.
        slots: tree slots.
        length: tokens of each tuple, ``NO_TOKEN`` before the start of the sequence.
    """
    tree, committed = request.tree, request.tokens
    above = [NO_TOKEN] * length + committed[max(0, len(committed) - length) :].tolist()
    tokens, parents = tree.tokens, tree.parents
    contexts = []
    for slot in slots:
        path: list[int] = []
        node = int(slot)
        while node > 0 and len(path) < length:
            path.append(int(tokens[node]))
            node = int(parents[node])
        path.reverse()
        missing = length - len(path)
        contexts.append((*above[len(above) - missing :], *path))
    return contexts
