"""Draws from discrete distributions by inverse CDF, in token-id order and float64.

A fixed token order and sequential sums make a draw a function of the distribution and the uniform
alone: neither the batch a row stands in nor the padding beside it changes the result.

Shape letters: A rows, S entries, V vocabulary, K draws per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec.types import FloatArray, IntArray

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
