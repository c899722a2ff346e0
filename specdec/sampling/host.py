"""Top-k and nucleus filters on logits on the host, row by row (``on_device`` elsewhere).

Every result is a function of its row alone: sums run in a fixed order, so neither the batch that a
row stands in nor padding changes it. Nothing sorts a whole row: with a vocabulary of thousands that
would cost more than a pass of a small draft.

Shape letters: A rows, V vocabulary, S entries kept per row, B bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

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


_BLOCK = 64  # entries summed as one in the first of the two levels
_DIRECT = 4 * _BLOCK  # up to so many entries one level is cheaper


@dataclass(frozen=True, slots=True)
class Distribution:
    """A rows of unnormalised probabilities over a vocabulary, stored for their support only.

    Attributes:
        ids: int64[A, S], token ids, increasing along a row up to padding; None where S is the whole
            vocabulary in order.
        weights: float64[A, S], >= 0, with at least one positive per row; 0 on padding.
        vocab_size: V.
    """

    ids: IntArray | None
    weights: FloatArray
    vocab_size: int

    def sample(self, uniforms: FloatArray) -> IntArray:
        """int64[A]: the token of each row at ``uniforms``[A] of its CDF in token-id order."""
        at = inverse_cdf(self.weights, uniforms)
        return at if self.ids is None else self.ids[np.arange(len(at)), at]

    def probs(self) -> FloatArray:
        """float64[A, V]: the normalised probabilities."""
        weights = self.weights
        if self.ids is None:
            return weights / weights.sum(axis=1, keepdims=True)
        total = weights.cumsum(axis=1)[:, -1:]  # unlike sum, the same whatever the padding
        dense = np.zeros((len(weights), self.vocab_size))
        rows, columns = np.nonzero(weights)
        dense[rows, self.ids[rows, columns]] = (weights / total)[rows, columns]
        return dense


def inverse_cdf(weights: FloatArray, uniforms: FloatArray) -> IntArray:
    """The first entry of each row whose cumulative share exceeds the row's uniform.

    Entries of weight 0 are never returned, also for the largest uniform below 1.

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
    # Two roundings of one sum may differ, so the draw can lie a rounding beyond its block's end.
    end = _BLOCK - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    at: IntArray = np.where(above[:, -1], above.argmax(axis=1), end)
    return block * _BLOCK + at


def _first_above(cdf: FloatArray, uniforms: FloatArray) -> tuple[IntArray, FloatArray]:
    """(first column whose cdf exceeds the draw, what is left of the draw within that column)."""
    draw = uniforms * cdf[:, -1]  # stays below cdf[:, -1]: u <= 1 - 2**-53 rounds down
    at: IntArray = (cdf > draw[:, None]).argmax(axis=1)
    before = cdf[np.arange(len(at)), np.maximum(at - 1, 0)]
    return at, draw - np.where(at > 0, before, 0.0)


def sample_candidates(
    probs: FloatArray, k: int, uniforms: FloatArray
) -> tuple[IntArray, FloatArray, IntArray]:
    """Draws up to ``k`` different tokens per row, without replacement.

    The j-th draw is by inverse CDF from the row renormalised without the earlier draws, which is
    the order that ``RejectionVerifier`` assumes.

    Args:
        probs: float64[W, V], each row summing to 1.
        k: draws per row.
        uniforms: float64[W, k] in [0, 1), a column per draw.

    Returns:
        tokens int64[W, k] in sampling order; log probabilities float64[W, k] under the row itself
        (not renormalised), -inf where there is none; counts int64[W], the smaller of ``k`` and the
        number of tokens with positive probability.
    """
    num_rows = len(probs)
    tokens = np.zeros((num_rows, k), np.int64)
    chances = np.zeros((num_rows, k))
    counts = np.minimum(np.count_nonzero(probs, axis=1), k)
    left = probs.copy()
    for draw in range(int(counts.max(initial=0))):
        live = np.flatnonzero(counts > draw)
        rows = left if len(live) == num_rows else left[live]
        drawn = inverse_cdf(rows, uniforms[live, draw])
        tokens[live, draw] = drawn
        chances[live, draw] = probs[live, drawn]
        left[live, drawn] = 0.0
    with np.errstate(divide="ignore"):
        return tokens, np.log(chances), counts
