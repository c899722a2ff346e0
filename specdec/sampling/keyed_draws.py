"""Keyed draws: counter-based random numbers that depend on their key only.

The draw for prompt r at position t is a function of (seed, r, t, purpose, index): the same on every
rank, in every batch and under every strategy. The generator is Philox4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), vectorised.

Shape letters: I sibling indices, T positions.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from specdec.types import FloatArray, IntArray

_Words = npt.NDArray[np.uint64]  # 32-bit words in 64 bits, so that products do not overflow

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)  # key schedule: golden ratio and sqrt(3) - 1
_MASK = 0xFFFFFFFF
_LOW = np.uint64(_MASK)
_SHIFT = np.uint64(32)
_INDEX_BITS = 24

_BLOCK = 128  # a table ends after the block that follows the last position it was computed for
_MAX_BLOCKS = 8
_MAX_CACHED_INDEX = 128
_MAX_TABLES = 4096
_NO_DRAWS: FloatArray = np.zeros((0, 0))


class Purpose(IntEnum):
    """Purpose of a draw; draws of different purposes are independent.

    ``TARGET``: the target's next token, including the bonus token. ``DRAFT``: a sampled candidate.
    ``ACCEPT``: the acceptance test of a candidate. ``RESIDUAL``: the correction token.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: tuple[_Words, ...], key: tuple[int, int]) -> tuple[_Words, ...]:
    """Philox4x32-10 on arrays of counters.

    Args:
        counter: four uint64 arrays of one shape, each entry below 2**32.
        key: two integers below 2**32.

    Returns:
        Four uint64 arrays of that shape with entries below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = c0 * _MULTIPLIERS[0]
        right = c2 * _MULTIPLIERS[1]
        c0 = (right >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c2 = (left >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1 = right & _LOW
        c3 = left & _LOW
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def keyed_uniforms(
    seed: int,
    prompt_ids: int | IntArray,
    positions: int | IntArray,
    purpose: Purpose,
    index: int | IntArray = 0,
) -> FloatArray:
    """Computes draws for arrays of keys; ``KeyedDraws`` caches its results.

    Args:
        seed: any integer; its low 64 bits are the key.
        prompt_ids: int or int64, broadcast against the others.
        positions: int or int64, 0 <= position < 2**32.
        purpose: of all draws.
        index: int or int64, sibling number, 0 <= index < 2**24.

    Returns:
        float64 in [0, 1), multiples of 2**-53, of the broadcast shape.
    """
    prompts, places, indices = (
        np.asarray(value, np.int64).astype(np.uint64) for value in (prompt_ids, positions, index)
    )
    prompts, places, indices = np.broadcast_arrays(prompts, places, indices)
    counter = (
        places & _LOW,
        indices | np.uint64(int(purpose) << _INDEX_BITS),
        prompts & _LOW,
        prompts >> _SHIFT,
    )
    high, low, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    return bits * 2.0**-53


class KeyedDraws:
    """The uniform draws of a run, keyed by (seed, prompt id, position, purpose, index).

    Draws are computed in blocks of positions and cached up to a limit.

    Attributes:
        seed: the run's seed.
    """

    def __init__(self, *, seed: int) -> None:
        """Starts with an empty cache.

        Args:
            seed: any integer; its low 64 bits are the key.
        """
        self.seed = seed
        # (prompt id, purpose) -> first position and values[I, T] from there on
        self._tables: dict[tuple[int, int], tuple[int, FloatArray]] = {}

    def uniform(
        self, prompt_id: int, positions: IntArray, purpose: Purpose, index: int | IntArray = 0
    ) -> FloatArray:
        """Returns draws for one prompt.

        Args:
            prompt_id: the prompt's id.
            positions: int64 of any shape, absolute positions of the drawn tokens: the token after
                a node at position p is drawn at p + 1.
            purpose: of all draws.
            index: sibling number, or an array that broadcasts against ``positions``.

        Returns:
            float64 in [0, 1) with 53 bits, of the broadcast shape.
        """
        if positions.size == 0:
            return np.zeros(np.broadcast_shapes(positions.shape, np.shape(index)))
        first, values = self._tables.get((prompt_id, purpose), (0, _NO_DRAWS))
        top = index if isinstance(index, int) else int(np.max(index))
        if positions.size == 1:
            low = high = int(positions.item())
        else:
            low, high = int(positions.min()), int(positions.max())
        if low < first or high >= first + values.shape[1] or top >= values.shape[0]:
            start, stop = low // _BLOCK, high // _BLOCK + 2
            if top >= _MAX_CACHED_INDEX or stop - start > _MAX_BLOCKS:
                return keyed_uniforms(self.seed, prompt_id, positions, purpose, index)
            if len(self._tables) >= _MAX_TABLES:
                del self._tables[next(iter(self._tables))]
            first, rows = start * _BLOCK, max(1 << top.bit_length(), values.shape[0])
            span = np.arange(first, stop * _BLOCK)
            values = keyed_uniforms(self.seed, prompt_id, span, purpose, np.arange(rows)[:, None])
            self._tables[(prompt_id, int(purpose))] = first, values
        drawn: FloatArray = values[index, positions - first]
        return drawn
