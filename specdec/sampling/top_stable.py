from __future__ import annotations

import numpy as np

from specdec.types import FloatArray, IntArray


def top_stable(values: FloatArray, num: int) -> IntArray:
    """Returns the indices of the ``num`` largest values, largest first, ties by index.

    Unlike ``argpartition``, ties are broken the same way on every machine and in every subset.
    """
    chosen = top_set(values, num)
    return chosen[(-values.take(chosen)).argsort(kind="stable")]


def top_set(values: FloatArray, num: int) -> IntArray:
    """Returns the same indices as ``top_stable`` in increasing order, which is faster."""
    if num >= len(values):
        return np.arange(len(values))
    if num <= 0:
        return np.zeros(0, np.int64)
    cut = np.partition(values, len(values) - num)[len(values) - num]
    chosen = (values >= cut).nonzero()[0]
    if len(chosen) > num:  # ties at the cut: the first of them
        left_out = (values.take(chosen) == cut).nonzero()[0][num - len(chosen) :]
        kept = np.ones(len(chosen), np.bool_)
        kept[left_out] = False
        chosen = chosen[kept]
    return chosen
