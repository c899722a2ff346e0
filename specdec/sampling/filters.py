"""Filters of the sampling transform on the host: temperature, top-k and top-p.

Results are the kept tokens of each row and their weights in float64. No function sorts a whole row,
which would cost more than a pass of a small draft.

Shape letters: A rows, V vocabulary, S entries stored per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specdec.sampling import large_rows
from specdec.types import BoolArray, FloatArray, IntArray

Values: TypeAlias = npt.NDArray[np.floating]
"""Logits in the model's precision, float32 or float64."""

_CHUNK = 1 << 18  # entries to process at a time: 2 MiB of float64, which fit the L2 cache
_MIN_BLOCKS = 256  # with fewer blocks, the search for the k-th largest uses SIMD badly
_BLOCKS_PER_CHOICE = 4
_BINS = 128
_NUCLEUS = 256  # entries of a row in which top-p's cut is first looked for
_BLOCKS = (64, 256)  # of a row of a large vocabulary, examined in turn for top-p's cut
_PIECES = 16  # of a row, which fit the cache
_TAIL_SHARE = 0.8  # of the mass that may be cut: estimated from a sample, so not all of it


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that the filters keep.

    Attributes:
        ids: int64[A, S], token ids, increasing along a row up to the padding.
        weights: float64[A, S], unnormalised probabilities; 0 for removed tokens and padding.
    """

    ids: IntArray
    weights: FloatArray


def check_finite(best: Values) -> None:
    """Checks that row maxima are finite: sampling rows with NaN or infinity would hide a fault.

    Raises:
        ValueError: if one is not, with its value and possible causes.
    """
    if all(map(isfinite, best.ravel().tolist())):  # few numbers: no array operation
        return
    raise ValueError(
        f"the largest logit of a row is {best[~np.isfinite(best)][0]}: the model returned NaN or"
        " infinity, or the logits processors banned every token; check the model's precision"
        " (dtype) and the processors"
    )


def row_max(values: Values) -> Values:
    """[A, 1]: the row maxima, checked to be finite."""
    best = values.max(axis=1, keepdims=True)
    check_finite(best)
    return best


def weights_of(values: Values, best: Values, temperature: float) -> FloatArray:
    """float64[A, S]: exp((values - best) / temperature), at most 1."""
    scaled = _scaled(values, best, temperature)
    return np.exp(scaled, out=scaled)


def _scaled(values: Values, best: Values, temperature: float) -> FloatArray:
    scaled = np.subtract(values, best, dtype=np.float64)
    if temperature != 1.0:
        scaled /= temperature
    return scaled


def at_least_kth(values: Values, k: int) -> tuple[IntArray, Values, Values]:
    """All entries that are at least the row's k-th largest value, and possibly a few more.

    Returns:
        (token ids int64[A, S], increasing along a row; values[A, S], -inf in the padding at the
        end; row maxima [A, 1]), S >= k.
    """
    if large_rows.serves(values) and k <= values.shape[1] // large_rows.BLOCK:
        flat, best = large_rows.at_least_kth(values, k)
        check_finite(best)
    else:
        best = row_max(values)
        flat = np.flatnonzero(values >= _lower_bound(values, k))
    return *_by_row(flat, values.reshape(-1)[flat], values.shape), best


def block_sums(values: Values, temperature: float) -> large_rows.BlockSums:
    """``large_rows.block_sums``, checked; raises as ``check_finite`` does."""
    parts = large_rows.block_sums(values, temperature)
    if not np.isfinite(parts.error).all():
        check_finite(values.max(axis=1))
    return parts


def best_entries(
    values: Values, parts: large_rows.BlockSums, temperature: float, k: int
) -> tuple[IntArray, Values]:
    """All entries at least as large as the row's k-th, and more; ids and values, each [A, S]."""
    num_blocks = 2 * k + 16
    if num_blocks < parts.sums.shape[1]:
        flat = large_rows.probable(values, np.arange(len(values)), parts, temperature, num_blocks)
        if np.bincount(flat // values.shape[1], minlength=len(values)).min() >= k:
            return _by_row(flat, values.reshape(-1)[flat], values.shape)
    return at_least_kth(values, k)[:2]


def _lower_bound(values: Values, k: int) -> Values:
    """[A, 1]: a lower bound of the row's k-th largest value, close to it.

    The k-th largest of block maxima: each of k blocks contains an entry at least as large. Much
    faster than a partition of the whole row.
    """
    vocab_size = values.shape[1]
    size = max(1, vocab_size // max(_BLOCKS_PER_CHOICE * k, _MIN_BLOCKS))
    num_blocks = vocab_size // size
    maxima = values[:, : num_blocks * size].reshape(-1, size, num_blocks).max(axis=1)
    kth = num_blocks - k
    return np.partition(maxima, kth, axis=1)[:, kth, None]


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


def keep_top_k(values: Values, temperature: float, top_k: int, top_p: float) -> Kept:
    """Applies temperature, top-k < V (including all entries that tie with the k-th), then top-p."""
    ids, chosen, ordered = largest(values, top_k)
    best, kth = ordered[:, -1:], ordered[:, -top_k, None]
    keep = chosen >= kth
    if top_p < 1.0:
        mass = weights_of(ordered, best, temperature)
        if ordered.shape[1] > top_k:
            mass[ordered < kth] = 0.0
        cdf = mass.cumsum(axis=1)
        keep &= _above_cut(chosen, ordered, cdf, (1.0 - top_p) * cdf[:, -1:])
    kept = weights_of(chosen, best, temperature)
    kept *= keep
    return Kept(ids, kept)


def largest(values: Values, k: int) -> tuple[IntArray, Values, Values]:
    """The k largest entries of each row, or a few more.

    Returns:
        (token ids int64[A, S], increasing along a row; values [A, S]; the values in ascending
        order), S >= k; -inf in the padding.
    """
    num_rows, vocab_size = values.shape
    if vocab_size < large_rows.MIN_VOCAB:
        ordered = np.partition(values, vocab_size - k, axis=1)[:, vocab_size - k :]
        ordered.sort(axis=1)
        check_finite(ordered[:, -1])
        flat = (values >= ordered[:, :1]).reshape(-1).nonzero()[0]
        if len(flat) == num_rows * k:  # no other entry ties with a row's k-th
            chosen = values.reshape(-1).take(flat).reshape(num_rows, k)
            ids = flat.reshape(num_rows, k)
            if num_rows > 1:
                ids -= np.arange(0, num_rows * vocab_size, vocab_size)[:, None]
            return ids, chosen, ordered
    ids, chosen, _ = at_least_kth(values, k)
    return ids, chosen, np.sort(chosen, axis=1)


def keep_top_p(values: Values, temperature: float, top_p: float) -> Iterator[tuple[IntArray, Kept]]:
    """Applies temperature, then top-p over the whole vocabulary, to groups of rows.

    Yields:
        (rows int64[G], their kept tokens); each row once, the groups in no particular order.
    """
    left = np.arange(len(values))
    if large_rows.serves(values):
        parts = block_sums(values, temperature)
        for num_blocks in _BLOCKS:
            if len(left) and num_blocks < parts.sums.shape[1]:
                flat = large_rows.probable(values, left, parts, temperature, num_blocks)
                kept, certain = _keep_selected(values, left, flat, parts, temperature, top_p)
                yield left[certain], kept
                left = left[~certain]
        undecided = [left[:0]]
        for row in left.tolist():
            mass = (1.0 - top_p) * _TAIL_SHARE
            flat = large_rows.above_tail(values, row, parts, temperature, mass)
            rows = np.array([row])
            kept, certain = _keep_selected(values, rows, flat, parts, temperature, top_p)
            yield rows[certain], kept
            undecided.append(rows[~certain])
        left = np.concatenate(undecided)
    for rows in chunks(left, values.shape[1]):
        some = rows_of(values, rows)
        if not large_rows.serves(values):
            kept, certain = _keep_nucleus(some, temperature, top_p)
            yield rows[certain], kept
            if certain.all():
                continue
            rows, some = rows[~certain], some[~certain]
        yield rows, _keep_top_p(some, temperature, top_p)


def _keep_nucleus(values: Values, temperature: float, top_p: float) -> tuple[Kept, BoolArray]:
    """Top-p among the largest entries of each row.

    Returns:
        (kept tokens of the rows that are certain; bool[A], whether a row is certain: all entries
        that were not looked at are cut).
    """
    vocab_size = values.shape[1]
    k = min(_NUCLEUS, vocab_size)
    ids, chosen, ordered = largest(values, k)
    best = ordered[:, -1:]
    cdf = weights_of(ordered, best, temperature).cumsum(axis=1)
    total = cdf[:, -1]
    if k < vocab_size:
        total = weights_of(values, best, temperature).sum(axis=1)
    # What is left to cut, after all entries that were not looked at.
    budget = (1.0 - top_p) * total - np.maximum(total - cdf[:, -1], 0.0)
    certain = budget >= 0.0
    weights = weights_of(chosen, best, temperature)
    weights *= _above_cut(chosen, ordered, cdf, budget[:, None])
    if certain.all():
        return Kept(ids, weights), certain
    return Kept(ids[certain], weights[certain]), certain


def chunks(rows: IntArray, vocab_size: int) -> Iterator[IntArray]:
    """Parts of ``rows`` whose intermediate results in float64 fit the cache."""
    step = max(1, _CHUNK // vocab_size)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def rows_of(values: Values, rows: IntArray) -> Values:
    """``values[rows]`` for increasing rows, without a copy of consecutive ones."""
    first, last = int(rows[0]), int(rows[-1])
    return values[first : last + 1] if last - first + 1 == len(rows) else values[rows]


def _keep_selected(
    values: Values,
    rows: IntArray,
    flat: IntArray,
    parts: large_rows.BlockSums,
    temperature: float,
    top_p: float,
) -> tuple[Kept, BoolArray]:
    """Top-p among selected entries of rows of a large vocabulary.

    Args:
        values: [A, V].
        rows: int64[G], increasing, the rows to process.
        flat: int64[N], increasing indices into the flattened ``values``: all entries of these rows
            that are at least some bound of the row.
        parts: of ``values``.
        temperature, top_p: of the filter.

    Returns:
        (kept tokens of the rows that are certain; bool[G], whether a row is certain: the entries
        that are not selected are cut, and the error of the total does not move the cut).
    """
    vocab_size = values.shape[1]
    lines = np.searchsorted(rows, flat // vocab_size)
    if not len(flat):
        return Kept(np.zeros((0, 1), np.int64), np.zeros((0, 1))), np.zeros(len(rows), np.bool_)
    shape = len(rows), vocab_size
    local = flat - (rows[lines] - lines) * vocab_size
    ids, chosen = _by_row(local, values.reshape(-1)[flat], shape)
    best = chosen.max(axis=1, keepdims=True)
    best[best == -np.inf] = 0.0  # no entry was selected: its mass is 0, and not certain
    ordered = np.sort(chosen, axis=1)
    cdf = weights_of(ordered, best, temperature).cumsum(axis=1)
    total = np.exp(parts.log_totals()[rows] - best[:, 0].astype(np.float64) / temperature)
    error = parts.error[rows]
    while True:
        enough = top_p * total
        budget, doubt = cdf[:, -1] - enough, enough * error
        certain = _is_certain(cdf, budget, doubt)
        close = np.flatnonzero(~certain & (budget > doubt) & (error > large_rows.EXACT))
        if not len(close):
            break
        for line in close:  # the total in float64 may decide
            pieces = np.array_split(values[rows[line]], _PIECES)
            total[line] = sum(weights_of(p, best[line], temperature).sum() for p in pieces)
        error[close] = large_rows.EXACT
    keep = _above_cut(chosen, ordered, cdf, budget[:, None])
    weights = np.where(keep, weights_of(chosen, best, temperature), 0.0)
    return Kept(ids[certain], weights[certain]), certain


def _is_certain(cdf: FloatArray, budget: FloatArray, doubt: FloatArray) -> BoolArray:
    """bool[A]: whether a ``budget`` that is wrong by ``doubt`` has the same place in ``cdf``."""
    with np.errstate(invalid="ignore"):
        near = (cdf > (budget - doubt)[:, None]) & (cdf <= (budget + doubt)[:, None])
        return (budget > doubt) & (cdf[:, -1] > budget + doubt) & ~near.any(axis=1)


def _keep_top_p(values: Values, temperature: float, top_p: float) -> Kept:
    """Applies temperature, then top-p over the whole vocabulary.

    The cut is located in a histogram of the mass over log-probability; only the bin that contains
    it is sorted.
    """
    shape, num_rows = values.shape, len(values)
    scaled = _scaled(values, row_max(values), temperature)
    mass = np.exp(scaled)
    total = mass.sum(axis=1)
    budget = (1.0 - top_p) * total  # mass that may be cut
    # Tokens below an equal share of the budget are all cut: together they are within it.
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
    above[:, -1] = True  # the best is kept, even if 1 - top_p rounds to 1
    cut = above.argmax(axis=1)
    rest = budget - np.where(cut > 0, tail_up[np.arange(num_rows), cut - 1], below)
    cut_bin = _BINS - 1 - cut

    split = np.flatnonzero(bins == cut_bin[rows])
    keep = bins < cut_bin[rows]
    keep[split] = _keep_of_bin(flat[split], scaled[split], rest, shape)
    ids, kept = _by_row(flat[keep], mass[keep], shape)
    return Kept(ids, np.maximum(kept, 0.0))  # padding: -inf -> 0


def _keep_of_bin(
    flat: IntArray, scaled: FloatArray, budget: FloatArray, shape: tuple[int, ...]
) -> BoolArray:
    """bool[len(flat)]: which entries of the bins that contain the cut are kept.

    ``flat`` are sorted indices into [A, V], ``scaled`` their log weights, and ``budget``[A] is the
    mass that may be cut from each bin.
    """
    _, chosen = _by_row(flat, scaled, shape)
    ordered = np.sort(chosen, axis=1)
    cdf = np.exp(ordered).cumsum(axis=1)
    return _above_cut(chosen, ordered, cdf, budget[:, None])[chosen > -np.inf]


def _above_cut(chosen: Values, ordered: Values, cdf: FloatArray, budget: FloatArray) -> BoolArray:
    """bool[A, S]: the entries that top-p keeps.

    As in transformers, entries in ascending order are cut while their cumulative mass is within
    the budget [A, 1], and the best is always kept. Of equal logits at the cut, the lower token ids
    are kept, as in greedy decoding (in transformers this depends on the sort). ``ordered`` is
    ``chosen`` in ascending order, and ``cdf`` its cumulative mass.
    """
    width = ordered.shape[1]
    cut = np.minimum((cdf <= budget).sum(axis=1), width - 1)
    rows = np.arange(len(cut))
    threshold = ordered[rows, cut]
    keep = chosen >= threshold[:, None]
    if np.count_nonzero(keep) == int((width - cut).sum()):
        return keep
    split = np.flatnonzero((cut > 0) & (ordered[rows, cut - 1] == threshold))
    for row in split:  # equal logits on both sides of the cut
        num_cut = int(cut[row]) - int(np.searchsorted(ordered[row], threshold[row]))
        ties = np.flatnonzero(chosen[row] == threshold[row])
        keep[row, ties[len(ties) - num_cut :]] = False
    return keep
