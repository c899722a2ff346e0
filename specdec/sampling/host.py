"""The sampling transform in numpy, for logits on the host: filters, distributions and draws.

``on_device`` is its counterpart in torch, for logits on an accelerator. Every result depends on its
row only: sums run in a fixed order, so neither the other rows of the batch nor padding changes it.
No function sorts a whole row, which would cost more than a pass of a small draft.

Shape letters: A rows, W nodes, V vocabulary, S entries stored per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specdec.types import BoolArray, FloatArray, IntArray

Values: TypeAlias = npt.NDArray[np.floating]
"""Logits in the model's precision, float32 or float64."""

_CHUNK = 1 << 18  # entries to process at a time: 2 MiB of float64, which fit the L2 cache
_MIN_BLOCKS = 256  # with fewer blocks, the search for the k-th largest uses SIMD badly
_BLOCKS_PER_CHOICE = 4
_BINS = 128
_BLOCK = 64  # entries per block in the first of the two levels of a cumulative sum
_DIRECT = 4 * _BLOCK  # for at most this many entries, one level is faster


def argmax(logits: Tensor) -> IntArray:
    """Returns int64[A]: the first of the largest entries of each row of logits[A, V]."""
    values = logits.numpy()
    best = values.argmax(axis=1)  # NaN counts as the largest
    check_finite(values[np.arange(len(best)), best])
    return best


def top_one(scores: Tensor) -> tuple[IntArray, FloatArray]:
    """Returns ``top`` with one token per row of scores[W, V], which takes no search for others."""
    values = scores.numpy()
    tokens = values.argmax(axis=1)[:, None]  # NaN counts as the largest
    logprobs = np.take_along_axis(values, tokens, 1).astype(np.float64)
    check_finite(logprobs[:, 0])
    return tokens, np.minimum(logprobs, 0.0)


def check_finite(best: Values) -> None:
    """Checks that row maxima are finite: sampling rows with NaN or infinity would hide a fault.

    Raises:
        ValueError: if one is not, with its value and possible causes.
    """
    finite = np.isfinite(best)
    if not finite.all():
        raise ValueError(
            f"the largest logit of a row is {best[~finite][0]}: the model returned NaN or infinity,"
            " or the logits processors banned every token; check the model's precision (dtype) and"
            " the processors"
        )


def sample(
    logits: Tensor, uniforms: FloatArray, *, temperature: float, top_k: int, top_p: float
) -> IntArray:
    """Returns int64[A]: the token at ``uniforms``[A] of each row's processed CDF in token-id order.

    Args:
        logits: [A, V], float32 or float64.
        uniforms: float64[A] in [0, 1).
        temperature: above 0.
        top_k: 0, or at least V, disables it.
        top_p: 1 disables it.

    Raises:
        ValueError: for rows with NaN, infinity or no allowed token.
    """
    parts = _weighed(logits, temperature, top_k, top_p)
    tokens = [part.sample(uniforms[rows]) for rows, part in parts]
    return tokens[0] if len(tokens) == 1 else np.concatenate(tokens)


def weigh(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Distribution:
    """Applies temperature, top-k (and all ties with the k-th), then top-p; see ``sample``."""
    return _stacked([part for _, part in _weighed(logits, temperature, top_k, top_p)])


def one_hot(logits: Tensor) -> Distribution:
    """Returns rows with all weight on the first of their largest entries."""
    best = argmax(logits)
    return Distribution(best[:, None], np.ones((len(best), 1)), logits.shape[1])


def top(scores: Tensor, k: int) -> tuple[IntArray, FloatArray]:
    """Returns the ``k`` best (tokens int64[W, S >= k], scores), ties in token-id order."""
    tokens, kept, _ = _at_least_kth(scores.numpy(), k)
    order = np.argsort(-kept, axis=1, kind="stable")
    logprobs = np.take_along_axis(kept, order, axis=1).astype(np.float64)
    return np.take_along_axis(tokens, order, axis=1), logprobs


def _row_max(values: Values) -> Values:
    """[A, 1]: the row maxima, checked to be finite."""
    best = values.max(axis=1, keepdims=True)
    check_finite(best)
    return best


def _weights(values: Values, best: Values, temperature: float) -> FloatArray:
    """float64[A, S]: exp((values - best) / temperature), at most 1."""
    scaled = _scaled(values, best, temperature)
    return np.exp(scaled, out=scaled)


def _scaled(values: Values, best: Values, temperature: float) -> FloatArray:
    scaled = np.subtract(values, best, dtype=np.float64)
    if temperature != 1.0:
        scaled /= temperature
    return scaled


# ---------------------------------------------------------------------- distributions


@dataclass(frozen=True, slots=True)
class Distribution:
    """A rows of unnormalised probabilities over a vocabulary, stored on their support.

    Attributes:
        ids: int64[A, S], token ids, increasing along a row up to the padding; None: the entries are
            the whole vocabulary in order.
        weights: float64[A, S], >= 0, with at least one positive entry per row; 0 in the padding.
        vocab_size: V.
    """

    ids: IntArray | None
    weights: FloatArray
    vocab_size: int

    def sample(self, uniforms: FloatArray) -> IntArray:
        """Returns int64[A]: each row's token at ``uniforms``[A] of its CDF in token-id order."""
        columns = inverse_cdf(self.weights, uniforms)
        return columns if self.ids is None else self.ids[np.arange(len(columns)), columns]

    def probs(self) -> FloatArray:
        """Returns the normalised probabilities, float64[A, V]."""
        weights = self.weights
        if self.ids is None:
            return weights / weights.sum(axis=1, keepdims=True)
        total = weights.cumsum(axis=1)[:, -1:]  # unlike sum, independent of padding
        dense = np.zeros((len(weights), self.vocab_size))
        rows, columns = np.nonzero(weights)
        dense[rows, self.ids[rows, columns]] = (weights / total)[rows, columns]
        return dense


def _stacked(parts: Sequence[Distribution]) -> Distribution:
    """Returns one distribution with the rows of all parts, padded to the widest."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.weights.shape[1] for part in parts)

    def widen(array: npt.NDArray) -> npt.NDArray:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])))

    ids = [widen(part.ids) for part in parts if part.ids is not None]
    rows = np.concatenate([widen(part.weights) for part in parts])
    return Distribution(np.concatenate(ids) if ids else None, rows, parts[0].vocab_size)


def inverse_cdf(weights: FloatArray, uniforms: FloatArray) -> IntArray:
    """Returns the first entry of each row whose cumulative share exceeds the row's uniform.

    It never returns entries of weight 0, even for the largest uniform below 1.

    Args:
        weights: float64[A, S], >= 0, each row with a positive finite sum.
        uniforms: float64[A] in [0, 1).

    Returns:
        int64[A].
    """
    num_entries = weights.shape[1]
    if num_entries <= _DIRECT:
        return _first_above(weights.cumsum(axis=1), uniforms)[0]
    full = num_entries // _BLOCK
    blocks = weights[:, : full * _BLOCK].reshape(-1, full, _BLOCK).sum(axis=2)
    if full * _BLOCK < num_entries:
        rest = weights[:, full * _BLOCK :].sum(axis=1)
        blocks = np.concatenate([blocks, rest[:, None]], axis=1)
    block, rest_of_draw = _first_above(blocks.cumsum(axis=1), uniforms)
    columns = np.minimum(block[:, None] * _BLOCK + np.arange(_BLOCK), num_entries - 1)
    inside = np.take_along_axis(weights, columns, axis=1)
    inside[block[:, None] * _BLOCK + np.arange(_BLOCK) >= num_entries] = 0.0
    cdf = inside.cumsum(axis=1)
    above = cdf > rest_of_draw[:, None]
    # The sums of a block and of its entries are rounded differently, so the draw may lie slightly
    # beyond the block's last entry.
    end = _BLOCK - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    offset: IntArray = np.where(above[:, -1], above.argmax(axis=1), end)
    return block * _BLOCK + offset


def _first_above(cdf: FloatArray, uniforms: FloatArray) -> tuple[IntArray, FloatArray]:
    """Returns the first column whose CDF exceeds the draw, and the draw's offset in that column."""
    draw = uniforms * cdf[:, -1]  # stays below cdf[:, -1]: u <= 1 - 2**-53 rounds down
    column: IntArray = (cdf > draw[:, None]).argmax(axis=1)
    before = cdf[np.arange(len(column)), np.maximum(column - 1, 0)]
    return column, draw - np.where(column > 0, before, 0.0)


def sample_candidates(
    probs: FloatArray, k: int, uniforms: FloatArray
) -> tuple[IntArray, FloatArray, IntArray]:
    """Samples up to ``k`` different tokens per row, without replacement.

    The j-th draw is by inverse CDF from the row without the earlier tokens, renormalised, as
    ``RejectionVerifier`` requires.

    Args:
        probs: float64[W, V], each row summing to 1.
        k: draws per row.
        uniforms: float64[W, k] in [0, 1), one column per draw.

    Returns:
        tokens int64[W, k] in sampling order; log probabilities float64[W, k] under the row itself
        (not renormalised), -inf for missing draws; counts int64[W], the smaller of ``k`` and the
        number of tokens with positive probability.
    """
    num_rows = len(probs)
    tokens = np.zeros((num_rows, k), np.int64)
    chances = np.zeros((num_rows, k))
    counts = np.minimum(np.count_nonzero(probs, axis=1), k)
    remaining = probs.copy()
    for draw in range(int(counts.max(initial=0))):
        live = np.flatnonzero(counts > draw)
        rows = remaining if len(live) == num_rows else remaining[live]
        drawn = inverse_cdf(rows, uniforms[live, draw])
        tokens[live, draw] = drawn
        chances[live, draw] = probs[live, drawn]
        remaining[live, drawn] = 0.0
    with np.errstate(divide="ignore"):
        return tokens, np.log(chances), counts


# ---------------------------------------------------------------------- filters


def _weighed(
    logits: Tensor, temperature: float, top_k: int, top_p: float
) -> Iterator[tuple[slice, Distribution]]:
    """Applies the filters; without top-k, which keeps few entries, to chunks of rows."""
    values = logits.numpy()
    num_rows, vocab_size = values.shape
    if 0 < top_k < vocab_size:
        yield slice(num_rows), _filter_top_k(values, temperature, top_k, top_p)
        return
    step = max(1, _CHUNK // vocab_size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        if top_p < 1.0:
            yield rows, _filter_top_p(values[rows], temperature, top_p)
        else:
            mass = _weights(values[rows], _row_max(values[rows]), temperature)
            yield rows, Distribution(None, mass, vocab_size)


def _at_least_kth(values: Values, k: int) -> tuple[IntArray, Values, Values]:
    """All entries that are at least the row's k-th largest value, and possibly a few more.

    Returns:
        (token ids int64[A, S], increasing along a row; values[A, S], -inf in the padding at the
        end; row maxima [A, 1]), S >= k.
    """
    best = _row_max(values)
    flat = np.flatnonzero(values >= _lower_bound(values, k))
    return *_by_row(flat, values.reshape(-1)[flat], values.shape), best


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


def _filter_top_k(values: Values, temperature: float, top_k: int, top_p: float) -> Distribution:
    """Applies temperature, top-k < V (including all entries that tie with the k-th), then top-p."""
    ids, chosen, best = _at_least_kth(values, top_k)
    ordered = np.sort(chosen, axis=1)
    kth = ordered[:, -top_k, None]
    keep = chosen >= kth
    if top_p < 1.0:
        mass = _weights(ordered, best, temperature)
        mass[ordered < kth] = 0.0
        cdf = mass.cumsum(axis=1)
        keep &= _above_cut(chosen, ordered, cdf, (1.0 - top_p) * cdf[:, -1:])
    kept = np.where(keep, _weights(chosen, best, temperature), 0.0)
    return Distribution(ids, kept, values.shape[1])


def _filter_top_p(values: Values, temperature: float, top_p: float) -> Distribution:
    """Applies temperature, then top-p over the whole vocabulary.

    The cut is located in a histogram of the mass over log-probability; only the bin that contains
    it is sorted.
    """
    shape, num_rows = values.shape, len(values)
    scaled = _scaled(values, _row_max(values), temperature)
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
    return Distribution(ids, np.maximum(kept, 0.0), shape[1])  # padding: -inf -> 0


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
