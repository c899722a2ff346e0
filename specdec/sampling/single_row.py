"""Draws from one row on the host with few array operations.

Right after a pass of a model, whose weights have taken the caches, an array operation takes some 4
us, however small the array. ``host`` takes about forty per call, which is little for many rows.
Here the largest entries of one row become Python lists. Sums run in the same order, so that a row
gets the same token alone and in a batch; what would need care is left to ``host``.

Shape letters: V vocabulary, S selected entries.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_SELECTED = 128
"""Largest top-k for which lists are faster than arrays."""

_NUCLEUS = 64  # entries of a row in which top-p's cut is looked for


def draw(
    row: npt.NDArray[np.floating[Any]],
    uniform: float,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> int | None:
    """Returns the token at ``uniform`` of the processed CDF in token-id order, see ``host.sample``.

    Args:
        row, temperature, top_k, top_p: see ``weigh``.
        uniform: in [0, 1).

    Returns:
        None where ``weigh`` returns it.
    """
    kept = weigh(row, temperature=temperature, top_k=top_k, top_p=top_p)
    if kept is None:
        return None
    ids, masses = kept
    cdf = list(accumulate(masses))
    return int(ids[bisect_right(cdf, uniform * cdf[-1])])


def weigh(
    row: npt.NDArray[np.floating[Any]], *, temperature: float, top_k: int, top_p: float
) -> tuple[npt.NDArray[np.int64], list[float]] | None:
    """Returns the largest entries and their weights, those that the filters remove with 0.

    Args:
        row: [V], float32 or float64.
        temperature, top_k, top_p: see ``host.sample``; at least one filter is on.

    Returns:
        int64[S], increasing token ids, and S weights. None where equal entries meet at a cut, where
        top-p keeps too many entries, and for rows with NaN or infinity.
    """
    filtered = 0 < top_k < len(row)
    k = top_k if filtered else min(_NUCLEUS, len(row))
    if k > MAX_SELECTED:
        return None
    selected = np.partition(row, len(row) - k)[-k:]
    best = float(selected.max())
    ids = (row >= selected[0]).nonzero()[0]
    if len(ids) != k or not isfinite(best):
        return None
    weights = _weights(row.take(ids), best, temperature)
    masses: list[float] = weights.tolist()
    if top_p < 1.0:
        ordered = sorted(masses)
        cdf = list(accumulate(ordered))
        budget = (1.0 - top_p) * cdf[-1]
        if not filtered and k < len(row):
            total = float(_weights(row, best, temperature).sum())
            budget = (1.0 - top_p) * total - max(total - cdf[-1], 0.0)
        if budget < 0.0:
            return None
        cut = min(bisect_right(cdf, budget), k - 1)
        least = ordered[cut]
        if cut and ordered[cut - 1] == least:
            return None
        masses = [mass if mass >= least else 0.0 for mass in masses]
    return ids, masses


def _weights(
    values: npt.NDArray[np.floating[Any]], best: float, temperature: float
) -> npt.NDArray[np.float64]:
    """float64[S]: as ``filters.weights_of``."""
    scaled = np.subtract(values, best, dtype=np.float64)
    if temperature != 1.0:
        scaled /= temperature
    return np.exp(scaled, out=scaled)
