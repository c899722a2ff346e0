"""Rows of a large vocabulary on the host: select first, then compute with what was selected.

A row of 128,256 float32 logits takes 0.5 MB. Its exponentials in float64, a sort, or a copy cost
more than a pass of many drafts. Here each row is read once in float32: sums of blocks of
exponentials, with a bound of their rounding error. Blocks with small sums contain no probable token
and are not examined further; logits of the others are processed in float64, as in ``host``. A
decision that lies within the error bound is reported as open, and ``host`` then computes the row
in float64. Results are therefore those of float64, not an approximation.

Shape letters: A rows, V vocabulary, B blocks, N selected entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specdec.types import BoolArray, FloatArray, IntArray

MIN_VOCAB = 1 << 14
"""Smallest vocabulary for which selecting first is faster than processing whole rows."""

OPEN = -1
"""Instead of a token: the row must be processed in float64."""

BLOCK = 64
"""Entries per block."""

_UNIT = 2.0**-24  # unit roundoff of float32
_EXP_ERROR = 6 * _UNIT  # of torch's float32 exp2: 1 unit in the last place, with a margin
_LOG2_E = 1.0 / math.log(2.0)
_SAMPLED = 16
_LARGEST_SUM = 1e30
_LEAST_BLOCK_SUM = 1e-30  # smaller ones may have lost terms that underflowed
_SMALLEST_SUM = 1e-20  # above it, exponentials that underflow are below 1e-13 of the sum

EXACT = 1e-12
"""Bound of the error of a sum of float64 weights, as a share of the sum."""


_Rows = npt.NDArray[np.float32]


def serves(values: npt.NDArray[np.floating]) -> bool:
    """Whether rows of logits[A, V] are processed by this module: float32, large vocabulary."""
    return values.dtype == np.float32 and values.shape[1] >= MIN_VOCAB


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Sums of exp(logits / temperature - shift) over blocks of ``BLOCK`` tokens.

    Attributes:
        sums: float32[A, B]; the last block may be shorter.
        totals: float64[A], the sums of the rows.
        shift: float64[A], subtracted from the scaled logits; 0 for logits of usual size.
        error: float64[A], bound of the rounding error of any sum of blocks, as a share of the
            total; inf for rows with NaN, infinity or no allowed token.
    """

    sums: _Rows
    totals: FloatArray
    shift: FloatArray
    error: FloatArray

    def log_totals(self) -> FloatArray:
        """float64[A]: log sum exp(logits / temperature)."""
        return np.log(self.totals) + self.shift


def block_sums(values: _Rows, temperature: float) -> BlockSums:
    """Reads each row of float32[A, V] once.

    exp(logit / temperature) is computed as 2 to the power of x, the logit scaled by a product with
    log2(e) / temperature, which is faster. The error bound adds up the rounding of x, of its
    exponential, and of a sum of ``BLOCK`` terms in any order. The first is proportional to abs(x),
    whose average over the distribution is at most abs(best x) + log V, because an entropy is at
    most log V.
    """
    num_rows, vocab_size = values.shape
    sums = np.empty((num_rows, -(-vocab_size // BLOCK)), np.float32)
    buffer = np.empty(vocab_size, np.float32)
    scale = float(np.float32(_LOG2_E / temperature))
    shift = np.zeros(num_rows)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for row, out in zip(values, sums, strict=True):
            _exponentials(row, scale, buffer)
            _sum_blocks(buffer, out)
        totals = sums.sum(axis=1, dtype=np.float64)
        usual = (totals > _SMALLEST_SUM) & (totals < _LARGEST_SUM)
        for row in np.flatnonzero(~usual):
            best = values[row].max()
            shift[row] = float(best) / temperature
            _exponentials(values[row] - best, scale, buffer)
            _sum_blocks(buffer, sums[row])
            totals[row] = sums[row].sum(dtype=np.float64)
    # A usual total bounds the best scaled logit: at most log(total), at least log(total / V).
    best = np.where(usual, np.abs(np.log(np.where(usual, totals, 1.0))), 0.0)
    roundings = np.where(usual, 0.0, _UNIT)
    roundings += _UNIT + abs(scale * temperature / _LOG2_E - 1.0)
    scaling = 1.01 * roundings * (best + 2.0 * np.log(vocab_size))
    error = scaling + _EXP_ERROR + BLOCK * _UNIT
    return BlockSums(sums, totals, shift, np.where(np.isfinite(totals), error, np.inf))


def _exponentials(row: _Rows, scale: float, out: _Rows) -> None:
    into = torch.from_numpy(out)
    torch.mul(torch.from_numpy(row), scale, out=into)
    into.exp2_()


_ONES = np.ones(BLOCK, np.float32)


def _sum_blocks(entries: _Rows, out: _Rows) -> None:
    full = len(entries) // BLOCK
    np.matmul(entries[: full * BLOCK].reshape(full, BLOCK), _ONES, out=out[:full])
    if full < len(out):
        out[full] = entries[full * BLOCK :].sum()


# ---------------------------------------------------------------------- selection


def at_least(values: _Rows, rows: IntArray, blocks: BoolArray, bound: _Rows) -> IntArray:
    """Selects entries of the chosen blocks that are at least the row's bound.

    Args:
        values: [A, V].
        rows: int64[G], increasing, the rows to look at.
        blocks: bool[G, B].
        bound: [G, 1].

    Returns:
        int64[N], increasing indices into the flattened ``values``.
    """
    vocab_size = values.shape[1]
    full = vocab_size // BLOCK
    by_block = torch.from_numpy(values)[:, : full * BLOCK].unflatten(1, (full, BLOCK)).numpy()
    lines, places = np.divmod(np.flatnonzero(blocks[:, :full]), full)
    starts = rows[lines] * vocab_size + places * BLOCK
    hits = np.flatnonzero(by_block[rows[lines], places] >= bound[lines])
    found, columns = np.divmod(hits, BLOCK)
    chosen = starts[found] + columns
    if full == blocks.shape[1]:
        return chosen
    rest_lines, rest_columns = np.nonzero(values[rows, full * BLOCK :] >= bound)
    rest = rows[rest_lines] * vocab_size + full * BLOCK + rest_columns
    return np.sort(np.concatenate([chosen, rest]))


def at_least_kth(values: _Rows, k: int) -> tuple[IntArray, _Rows]:
    """Selects all entries that are at least the row's k-th largest, and possibly a few more.

    The bound is the k-th largest of the blocks' maxima: each of k blocks contains such an entry.

    Args:
        values: [A, V].
        k: at most the number of blocks.

    Returns:
        (int64[N], increasing indices into the flattened ``values``; row maxima [A, 1], NaN in rows
        with NaN).
    """
    vocab_size = values.shape[1]
    full = vocab_size // BLOCK
    tensor = torch.from_numpy(values)
    maxima = tensor[:, : full * BLOCK].unflatten(1, (full, BLOCK)).amax(dim=2).numpy()
    if full * BLOCK < vocab_size:
        rest = values[:, full * BLOCK :].max(axis=1, keepdims=True)
        maxima = np.concatenate([maxima, rest], axis=1)
    place = maxima.shape[1] - k
    bound = np.partition(maxima, place, axis=1)[:, place, None]
    chosen = at_least(values, np.arange(len(values)), maxima >= bound, bound)
    return chosen, maxima.max(axis=1, keepdims=True)


def probable(
    values: _Rows, rows: IntArray, parts: BlockSums, temperature: float, num_blocks: int
) -> IntArray:
    """Selects the most probable entries: all above the sum of any block that is not examined.

    Args:
        values: [A, V].
        rows: int64[G], increasing, the rows to look at.
        parts: of ``values``.
        temperature: of ``parts``.
        num_blocks: number of blocks to examine per row, fewer than B.

    Returns:
        int64[N], increasing indices into the flattened ``values``: all entries of a row that are
        at least some bound, and no others.
    """
    sums = parts.sums[rows]
    place = sums.shape[1] - num_blocks - 1
    largest_left_out = np.partition(sums, place, axis=1)[:, place, None]
    # An entry of a block that is left out is at most the block's sum, up to the rounding of both.
    slack = 1.0 + 2.0 * (_EXP_ERROR + BLOCK * _UNIT)
    scaled = np.log(np.maximum(largest_left_out, _LEAST_BLOCK_SUM).astype(np.float64) * slack)
    spread = np.abs(scaled) * 4 * _UNIT  # rounding of the scaled logits
    logits = (scaled + spread + parts.shift[rows, None]) * temperature
    bound = np.nextafter(logits.astype(np.float32), np.float32(np.inf))
    return at_least(values, rows, sums > largest_left_out, bound)


def above_tail(
    values: _Rows, row: int, parts: BlockSums, temperature: float, mass: float
) -> IntArray:
    """Selects entries of a row of which many are probable: about those above a tail of ``mass``.

    The bound is that of a sample of every 16th block, in which improbable entries are well
    represented.

    Args:
        values: [A, V].
        row: the row to look at.
        parts: of ``values``.
        temperature: of ``parts``.
        mass: probability of the entries to leave out.

    Returns:
        As of ``probable``.
    """
    vocab_size = values.shape[1]
    full = vocab_size // BLOCK
    entries = values[row]
    ordered = np.sort(entries[: full * BLOCK].reshape(full, BLOCK)[::_SAMPLED].ravel())
    weights = np.exp(ordered.astype(np.float64) / temperature - parts.shift[row])
    place = np.searchsorted(weights.cumsum() * _SAMPLED, mass * parts.totals[row])
    return row * vocab_size + np.flatnonzero(entries >= ordered[min(place, len(ordered) - 1)])


# ---------------------------------------------------------------------- draws without filters


def sample(values: _Rows, uniforms: FloatArray, temperature: float) -> IntArray:
    """Draws a token of each row, float32[A, V], by inverse CDF in token-id order.

    Returns:
        int64[A]; ``OPEN`` for rows whose draw is within the error bound of an edge of the CDF.
    """
    parts = block_sums(values, temperature)
    cdf = parts.sums.cumsum(axis=1, dtype=np.float64)
    draw = uniforms * cdf[:, -1]
    rows = np.arange(len(values))
    block = (cdf > draw[:, None]).argmax(axis=1)
    before = np.where(block > 0, cdf[rows, np.maximum(block - 1, 0)], 0.0)
    columns = block[:, None] * BLOCK + np.arange(BLOCK)
    inside = values[rows[:, None], np.minimum(columns, values.shape[1] - 1)].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(inside / temperature - parts.shift[:, None])
    weights[columns >= values.shape[1]] = 0.0
    edges = weights.cumsum(axis=1)
    rest = (draw - before)[:, None]
    offset = (edges > rest).argmax(axis=1)
    below = np.where(offset > 0, edges[rows, np.maximum(offset - 1, 0)], 0.0)
    # The bound applies to ``before`` and to ``draw``.
    doubt = 2.0 * parts.error * parts.totals
    certain = (rest[:, 0] - below > doubt) & (edges[rows, offset] - rest[:, 0] > doubt)
    return np.where(certain, block * BLOCK + offset, OPEN)
