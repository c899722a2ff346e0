"""Good-Turing discounts of n-gram counts, as Katz (1987) uses them.

Shape letters: G n-grams of one order.
"""

from __future__ import annotations

import numpy as np

from specdec.types import FloatArray, IntArray

_MAX_DISCOUNTED = 5  # Katz 1987: counts above 5 are taken as reliable


def discounts(counts: IntArray) -> FloatArray:
    """Good-Turing discount factors in Katz's form.

    With n_r n-grams counted r times, k = 5 and r* = (r+1) n_{r+1}/n_r:
    d_r = (r*/r - (k+1) n_{k+1}/n_1) / (1 - (k+1) n_{k+1}/n_1) for r <= k, and 1 above. Where a
    count-of-counts is missing or a factor leaves (0, 1), k is lowered until none does; where no
    k >= 2 is left, absolute discounting takes its place: d_r = 1 - D/r for all r, with
    D = n_1 / (n_1 + 2 n_2), or 1/2 where n_1 or n_2 is 0.

    Args:
        counts: int64[G >= 1], the counts of one order's n-grams, all positive.

    Returns:
        float64[G], the factor of each n-gram.
    """
    num = np.bincount(np.minimum(counts, _MAX_DISCOUNTED + 2), minlength=_MAX_DISCOUNTED + 3)
    for k in range(_MAX_DISCOUNTED, 1, -1):
        if not num[1 : k + 2].all():
            continue
        r = np.arange(1, k + 1)
        rest = (k + 1) * num[k + 1] / num[1]
        if rest >= 1.0:
            continue
        factors = ((r + 1) * num[2 : k + 2] / (num[1 : k + 1] * r) - rest) / (1.0 - rest)
        if (factors > 0.0).all() and (factors < 1.0).all():
            table = np.concatenate([[1.0], factors, [1.0]])
            return table[np.minimum(counts, k + 1)]
    absolute = num[1] / (num[1] + 2 * num[2]) if num[1] and num[2] else 0.5
    return 1.0 - absolute / counts
