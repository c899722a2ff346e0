"""Top-k and nucleus filters on logits on the host, row by row (``device_sampling`` elsewhere).

Every result is a function of its row alone: sums run in a fixed order, so neither the batch that a
row stands in nor padding changes it. Nothing sorts a whole row: with a vocabulary of thousands that
would cost more than a pass of a small draft.

Shape letters: A rows, V vocabulary, S entries kept per row, B bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from specdec.distribution import Distribution
from specdec.types import BoolArray, FloatArray, IntArray

Values: TypeAlias = npt.NDArray[np.floating]
"""Logits in the model's precision, float32 or float64."""

CHUNK = 1 << 18
"""Entries to work on at a time: 2 MiB of float64, which stays in the L2 cache."""

_MIN_BLOCKS = 256  # fewer blocks would be too long for SIMD in the search for the k-th largest
_BLOCKS_PER_CHOICE = 4
_BINS = 128


def argmax(logits: torch.Tensor) -> IntArray:
    """int64[A]: the first of the largest entries of each row."""
    values = logits.numpy()
    best = values.argmax(axis=1)  # a NaN is the largest of all
    check_finite(values[np.arange(len(best)), best])
    return best


def row_max(values: Values) -> Values:
    """[A, 1], checked to be finite."""
    best = values.max(axis=1, keepdims=True)
    check_finite(best)
    return best


def check_finite(best: Values) -> None:
    """Refuses rows with NaN, +inf or no allowed token: sampling them would hide the fault.

    Raises:
        ValueError: with the value and what may have caused it.
    """
    finite = np.isfinite(best)
    if not finite.all():
        raise ValueError(
            f"the largest logit of a row is {best[~finite][0]}: the model returned NaN or infinity,"
            " or the logits processors banned every token; check the model's precision (dtype) and"
            " the processors"
        )


def weights(values: Values, best: Values, temperature: float) -> FloatArray:
    """float64[A, S]: exp((values - best) / temperature), at most 1."""
    scaled = _scaled(values, best, temperature)
    return np.exp(scaled, out=scaled)


def _scaled(values: Values, best: Values, temperature: float) -> FloatArray:
    scaled = np.subtract(values, best, dtype=np.float64)
    if temperature != 1.0:
        scaled /= temperature
    return scaled


def at_least_kth(logits: torch.Tensor, k: int) -> tuple[IntArray, Values, Values]:
    """Entries among which are all those that reach the row's k-th largest value.

    There may be a few more.

    Args:
        logits: [A, V].
        k: 1 <= k <= V.

    Returns:
        (token ids int64[A, S], increasing along a row; values[A, S], -inf on padding at the end;
        row maxima [A, 1]), S >= k.
    """
    values = logits.numpy()
    best = row_max(values)
    flat = np.flatnonzero(values >= _lower_bound(values, k))
    return *_by_row(flat, values.reshape(-1)[flat], values.shape), best


def _lower_bound(values: Values, k: int) -> Values:
    """[A, 1]: a value that at least ``k`` entries of the row reach, close to the k-th largest.

    The k-th largest of block maxima: each of k blocks holds such an entry. Far cheaper than a
    partition of the whole row.
    """
    vocab_size = values.shape[1]
    size = max(1, vocab_size // max(_BLOCKS_PER_CHOICE * k, _MIN_BLOCKS))
    num_blocks = vocab_size // size
    maxima = values[:, : num_blocks * size].reshape(-1, size, num_blocks).max(axis=1)
    at = num_blocks - k
    return np.partition(maxima, at, axis=1)[:, at, None]


def _by_row(flat: IntArray, chosen: Values, shape: tuple[int, ...]) -> tuple[IntArray, Values]:
    """Entries at sorted flat indices of an [A, V] array as (ids[A, S], values[A, S])."""
    num_rows, vocab_size = shape
    if num_rows == 1:
        return flat[None], chosen[None]
    starts = np.searchsorted(flat, np.arange(num_rows) * vocab_size)
    counts = np.diff(starts, append=len(flat))
    rows = np.repeat(np.arange(num_rows), counts)
    columns = np.arange(len(flat)) - starts[rows]
    width = int(counts.max())
    ids = np.zeros((num_rows, width), np.int64)
    ids[rows, columns] = flat - rows * vocab_size
    padded = np.full((num_rows, width), -np.inf, chosen.dtype)
    padded[rows, columns] = chosen
    return ids, padded


def filter_top_k(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> Distribution:
    """Temperature, top-k (with all that tie with the k-th), then top-p.

    Args:
        logits: [A, V].
        temperature: above 0.
        top_k: 1 <= k < V.
        top_p: 1 is off.
    """
    ids, chosen, best = at_least_kth(logits, top_k)
    ordered = np.sort(chosen, axis=1)
    kth = ordered[:, -top_k, None]
    keep = chosen >= kth
    if top_p < 1.0:
        mass = weights(ordered, best, temperature)
        mass[ordered < kth] = 0.0
        cdf = mass.cumsum(axis=1)
        keep &= _above_cut(chosen, ordered, cdf, (1.0 - top_p) * cdf[:, -1:])
    kept = np.where(keep, weights(chosen, best, temperature), 0.0)
    return Distribution(ids, kept, logits.shape[1])


def filter_top_p(values: Values, temperature: float, top_p: float) -> Distribution:
    """Temperature, then top-p over the whole vocabulary.

    The cut is located by a histogram of the mass over log-probability; only the bin that it falls
    into is sorted.

    Args:
        values: [A, V].
        temperature: above 0.
        top_p: below 1.
    """
    shape, num_rows = values.shape, len(values)
    scaled = _scaled(values, row_max(values), temperature)
    mass = np.exp(scaled)
    total = mass.sum(axis=1)
    budget = (1.0 - top_p) * total  # what may be cut
    # Tokens that are each below an equal share of the budget are cut all together.
    share = budget[:, None] / shape[1]
    flat = np.flatnonzero(mass >= share)
    starts = np.searchsorted(flat, np.arange(num_rows) * shape[1])
    rows = np.repeat(np.arange(num_rows), np.diff(starts, append=len(flat)))
    scaled, mass = scaled.reshape(-1)[flat], mass.reshape(-1)[flat]

    steepness = _BINS / np.minimum(np.log(share[:, 0]), -1e-6)
    bins = np.minimum((scaled * steepness[rows]).astype(np.int64), _BINS - 1)
    by_bin = np.bincount(rows * _BINS + bins, weights=mass, minlength=num_rows * _BINS)
    tail_up = by_bin.reshape(num_rows, _BINS)[:, ::-1].cumsum(axis=1)  # from the least probable
    below = total - tail_up[:, -1]
    tail_up += below[:, None]
    above = tail_up > budget[:, None]
    above[:, -1] = True  # the best is kept, also where 1 - top_p rounds to 1
    at = above.argmax(axis=1)
    left = budget - np.where(at > 0, tail_up[np.arange(num_rows), at - 1], below)
    cut_bin = _BINS - 1 - at

    split = np.flatnonzero(bins == cut_bin[rows])
    keep = bins < cut_bin[rows]
    keep[split] = _keep_of_bin(flat[split], scaled[split], left, shape)
    ids, kept = _by_row(flat[keep], mass[keep], shape)
    return Distribution(ids, np.maximum(kept, 0.0), shape[1])  # padding: -inf -> 0


def _keep_of_bin(
    flat: IntArray, scaled: FloatArray, left: FloatArray, shape: tuple[int, ...]
) -> BoolArray:
    """bool[len(flat)]: which entries of the bins that the cut falls into are kept.

    Args:
        flat: int64, indices into [A, V], sorted.
        scaled: float64, their log weights.
        left: float64[A], mass that may still be cut.
        shape: (A, V).
    """
    _, chosen = _by_row(flat, scaled, shape)
    ordered = np.sort(chosen, axis=1)
    cdf = np.exp(ordered).cumsum(axis=1)
    return _above_cut(chosen, ordered, cdf, left[:, None])[chosen > -np.inf]


def _above_cut(chosen: Values, ordered: Values, cdf: FloatArray, budget: FloatArray) -> BoolArray:
    """bool[A, S]: the entries that top-p keeps.

    As in transformers: of the ascending order those are cut whose cumulative mass is within the
    budget; the best is always kept. Which of several equal logits are cut is left to the sort
    there; here the lower token ids stay, as in greedy decoding.

    Args:
        chosen: [A, S], logits in token-id order, -inf on padding.
        ordered: [A, S], the same, ascending.
        cdf: float64[A, S], cumulative mass of ``ordered``.
        budget: float64[A, 1], mass that may be cut.
    """
    above = cdf > budget
    cut = np.where(above[:, -1], above.argmax(axis=1), above.shape[1] - 1)
    rows = np.arange(len(cut))
    threshold = ordered[rows, cut]
    keep = chosen >= threshold[:, None]
    split = np.flatnonzero((cut > 0) & (ordered[rows, cut - 1] == threshold))
    for row in split:  # equal logits on both sides of the cut
        num_cut = int(cut[row]) - int(np.searchsorted(ordered[row], threshold[row]))
        ties = np.flatnonzero(chosen[row] == threshold[row])
        keep[row, ties[len(ties) - num_cut :]] = False
    return keep


def stacked(parts: Sequence[Distribution]) -> Distribution:
    """One distribution of the rows of several, padded to the widest."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.weights.shape[1] for part in parts)

    def widen(array: npt.NDArray) -> npt.NDArray:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])))

    ids = [widen(part.ids) for part in parts if part.ids is not None]
    rows = np.concatenate([widen(part.weights) for part in parts])
    return Distribution(np.concatenate(ids) if ids else None, rows, parts[0].vocab_size)
