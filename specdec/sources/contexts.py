"""The tokens before a node, and keyed hashes.

Shape letters: W nodes, L tokens of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from specdec.state import RequestState

NO_TOKEN = -1
"""Placeholder for tokens before the start of the sequence."""

_GAMMA = 0x9E3779B97F4A7C15  # odd constant of splitmix64 (Steele et al. 2014)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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


def hash_u64(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Keyed hash of integers, element by element (broadcast): splitmix64 folded over the parts.

    Args:
        seed: any integer.
        parts: integer arrays or scalars that broadcast against each other.

    Returns:
        uint64 of the broadcast shape, uniform over 64 bits.
    """
    value: npt.NDArray[np.uint64] = np.array(seed & 0xFFFFFFFFFFFFFFFF, np.uint64)
    value = _finish(value)
    for part in parts:
        value = _finish(value ^ np.asarray(part).astype(np.uint64))
    return value


def hash_uniform(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """``hash_u64`` as float64 in [0, 1) with 53 random bits."""
    return (hash_u64(seed, *parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _finish(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):  # intended arithmetic modulo 2^64
        value = value + np.uint64(_GAMMA)
        value = (value ^ (value >> np.uint64(30))) * _MIX_1
        value = (value ^ (value >> np.uint64(27))) * _MIX_2
        return value ^ (value >> np.uint64(31))
