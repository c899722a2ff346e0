"""Selection of the largest values, with ties broken by index."""

from __future__ import annotations

import numpy as np

from specdec.types import FloatArray, IntArray

_FEW = 8  # for at most this many maxima, repeated argmax is faster than a partition
_SORT_ALL = 256  # for at most this many values, a full stable sort is faster than a partition


def top_stable(values: FloatArray, num: int) -> IntArray:
    """Returns the indices of the ``num`` largest values, largest first, ties by index.

    Unlike ``argpartition``, ties are broken the same way on every machine and in every subset.
    """
    if len(values) <= _SORT_ALL:
        return (-values).argsort(kind="stable")[: max(num, 0)]
    chosen = top_set(values, num)
    return chosen[(-values.take(chosen)).argsort(kind="stable")]


def top_set(values: FloatArray, num: int) -> IntArray:
    """Returns the same indices as ``top_stable`` in increasing order, which is faster."""
    if num >= len(values):
        return np.arange(len(values))
    if len(values) <= _SORT_ALL:
        chosen = (-values).argsort(kind="stable")[: max(num, 0)]
        chosen.sort()
        return chosen
    if num <= 0:
        return np.zeros(0, np.int64)
    if num <= _FEW and (few := _few_best(values, num)) is not None:
        return few
    cut = np.partition(values, len(values) - num)[len(values) - num]
    chosen = (values >= cut).nonzero()[0]
    if len(chosen) > num:  # ties at the cut: the first of them
        left_out = (values.take(chosen) == cut).nonzero()[0][num - len(chosen) :]
        kept = np.ones(len(chosen), np.bool_)
        kept[left_out] = False
        chosen = chosen[kept]
    return chosen


def _few_best(values: FloatArray, num: int) -> IntArray | None:
    """``top_set`` by repeated maxima; None if fewer than ``num`` values are above -inf."""
    remaining = values.copy()
    chosen = np.empty(num, np.int64)
    for i in range(num):
        best = remaining.argmax()  # the first of equal values
        if remaining[best] == -np.inf:
            return None
        chosen[i] = best
        remaining[best] = -np.inf
    chosen.sort()
    return chosen
