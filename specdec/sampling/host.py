"""The sampling transform in numpy, for logits on the host: filters, distributions and draws.

``on_device`` is its counterpart in torch, for logits on an accelerator. Every result depends on its
row only: sums run in a fixed order, so neither the other rows of the batch nor padding changes it.
No function sorts a whole row, which would cost more than a pass of a small draft.

Shape letters: A rows, W nodes, V vocabulary, S entries stored per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specdec.device import SupportProbs, on_host
from specdec.sampling import large_rows, single_row
from specdec.sampling.filters import (
    Values,
    best_entries,
    block_sums,
    check_finite,
    chunks,
    keep_top_k,
    keep_top_p,
    largest,
    row_max,
    rows_of,
    weights_of,
)
from specdec.types import FloatArray, IntArray

_BLOCK = 64  # entries per block in the first of the two levels of a cumulative sum
_DIRECT = 4 * _BLOCK  # for at most this many entries, one level is faster


def argmax(logits: Tensor) -> IntArray:
    """Returns int64[A]: the first of the largest entries of each row of logits[A, V]."""
    values = logits.numpy()
    best = values.argmax(axis=1)  # NaN counts as the largest
    check_finite(_at(values, best))
    return best


def top_one(scores: Tensor) -> tuple[IntArray, FloatArray]:
    """Returns ``top`` with one token per row, which takes no search for others."""
    values = scores.numpy()
    tokens = values.argmax(axis=1)  # NaN counts as the largest
    logprobs = _at(values, tokens)
    check_finite(logprobs)
    return tokens[:, None], np.minimum(logprobs, 0.0, dtype=np.float64)[:, None]


def _at(values: Values, columns: IntArray) -> Values:
    """[A]: the entry of each row of values[A, V] in the given column."""
    if len(columns) == 1:
        return values[0].take(columns)
    return values[np.arange(len(columns)), columns]


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
    values = logits.numpy()
    filtered = 0 < top_k < values.shape[1]
    if _is_single(values, top_k, top_p):
        token = single_row.draw(
            values[0], float(uniforms[0]), temperature=temperature, top_k=top_k, top_p=top_p
        )
        if token is not None:
            return np.array([token])
    if filtered:
        kept = keep_top_k(values, temperature, top_k, top_p)
        return Distribution(kept.ids, kept.weights, values.shape[1]).sample(uniforms)
    tokens, left = np.empty(len(values), np.int64), np.arange(len(values))
    if large_rows.serves(values) and top_p == 1.0:
        tokens = large_rows.sample(values, uniforms, temperature)
        left = np.flatnonzero(tokens == large_rows.OPEN)
    if len(left):
        for rows, part in _weighed(rows_of(values, left), temperature, top_k, top_p):
            tokens[left[rows]] = part.sample(uniforms[left[rows]])
    return tokens


def _is_single(values: Values, top_k: int, top_p: float) -> bool:
    """Whether ``single_row`` may serve these rows."""
    num_rows, vocab_size = values.shape
    filtered = 0 < top_k < vocab_size or top_p < 1.0
    return num_rows == 1 and filtered and vocab_size < large_rows.MIN_VOCAB


def weigh(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Distribution:
    """Applies temperature, top-k (and all ties with the k-th), then top-p; see ``sample``."""
    values = logits.numpy()
    if _is_single(values, top_k, top_p):
        kept = single_row.weigh(values[0], temperature=temperature, top_k=top_k, top_p=top_p)
        if kept is not None:
            ids, masses = kept
            return Distribution(ids[None], np.array([masses]), values.shape[1])
    groups, parts = zip(*_weighed(values, temperature, top_k, top_p), strict=True)
    return _stacked(groups, parts)


def top_of_large(logits: Tensor, k: int, temperature: float) -> tuple[IntArray, FloatArray]:
    """Returns the ``k`` best tokens and their log probabilities, int64 and float64[W, k].

    For logits that ``large_rows`` serves; k is at most V. Ties are in token-id order.
    """
    values = logits.numpy()
    parts = block_sums(values, temperature)
    ids, chosen = best_entries(values, parts, temperature, k)
    order = np.argsort(-chosen, axis=1, kind="stable")[:, :k]
    scaled = np.take_along_axis(chosen, order, axis=1).astype(np.float64) / temperature
    tokens = np.take_along_axis(ids, order, axis=1)
    return tokens, scaled - parts.log_totals()[:, None]


def _weighed(
    values: Values, temperature: float, top_k: int, top_p: float
) -> Iterator[tuple[IntArray, Distribution]]:
    """The processed distributions of values[A, V], in groups of rows with their indices."""
    num_rows, vocab_size = values.shape
    if 0 < top_k < vocab_size:
        kept = keep_top_k(values, temperature, top_k, top_p)
        yield np.arange(num_rows), Distribution(kept.ids, kept.weights, vocab_size)
    elif top_p < 1.0:
        for rows, kept in keep_top_p(values, temperature, top_p):
            yield rows, Distribution(kept.ids, kept.weights, vocab_size)
    else:
        for rows in chunks(np.arange(num_rows), vocab_size):
            some = rows_of(values, rows)
            mass = weights_of(some, row_max(some), temperature)
            yield rows, Distribution(None, mass, vocab_size)


def one_hot(logits: Tensor) -> Distribution:
    """Returns rows with all weight on the first of their largest entries."""
    best = argmax(logits)
    return Distribution(best[:, None], np.ones((len(best), 1)), logits.shape[1])


def top(scores: Tensor, k: int) -> tuple[IntArray, FloatArray]:
    """Returns the ``k`` best tokens of each row of scores[W, V] and their scores, at most 0.

    Returns:
        tokens int64[W, k], ties in token-id order; float64[W, k].
    """
    ids, kept, _ = largest(scores.numpy(), k)
    order = (-kept).argsort(axis=1, kind="stable")[:, :k]
    if len(order) > 1:
        order += np.arange(0, kept.size, kept.shape[1])[:, None]
    best = kept.reshape(-1).take(order)
    return ids.reshape(-1).take(order), np.minimum(best, 0.0, dtype=np.float64)


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
        return on_host(self.on_support())

    def on_support(self) -> FloatArray | SupportProbs:
        """Returns the normalised probabilities without those of removed tokens, if any are."""
        weights = self.weights
        if self.ids is None:
            return weights / weights.sum(axis=1, keepdims=True)
        total = weights.cumsum(axis=1)[:, -1:]  # unlike sum, independent of padding
        return SupportProbs(self.ids, weights / total, self.vocab_size)


def _stacked(groups: Sequence[IntArray], parts: Sequence[Distribution]) -> Distribution:
    """Returns one distribution of the rows of all parts, in the order of their indices."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.weights.shape[1] for part in parts)

    def merged(arrays: Sequence[npt.NDArray]) -> npt.NDArray:
        whole = np.zeros((sum(len(rows) for rows in groups), width), arrays[0].dtype)
        for rows, array in zip(groups, arrays, strict=True):
            whole[rows, : array.shape[1]] = array
        return whole

    ids = [part.ids for part in parts if part.ids is not None]
    weights = merged([part.weights for part in parts])
    return Distribution(merged(ids) if ids else None, weights, parts[0].vocab_size)


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
        cdf = weights.cumsum(axis=1)
        # The draw stays below the last entry: u <= 1 - 2**-53 rounds down.
        first: IntArray = (cdf > uniforms[:, None] * cdf[:, -1:]).argmax(axis=1)
        return first
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
