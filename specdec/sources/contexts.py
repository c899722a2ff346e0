"""The tokens before a node, as the context of an n-gram.

Shape letters: W nodes, L tokens of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.state import RequestState

NO_TOKEN = -1
"""Stands for a token before the start of the sequence."""


def tails(request: RequestState, slots: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """The last ``length`` tokens up to and including each node, oldest first.

    Args:
        request: whose committed tokens and tree are read.
        slots: tree slots.
        length: tokens of each tuple, ``NO_TOKEN`` before the start of the sequence.
    """
    tree, committed = request.tree, request.tokens
    above = [NO_TOKEN] * length + committed[max(0, len(committed) - length) :].tolist()
    tokens, parents = tree.tokens, tree.parents
    found = []
    for slot in slots:
        path: list[int] = []
        here = int(slot)
        while here > 0 and len(path) < length:
            path.append(int(tokens[here]))
            here = int(parents[here])
        path.reverse()
        missing = length - len(path)
        found.append((*above[len(above) - missing :], *path))
    return found
