"""Keyed draws: random numbers that depend only on a key, not on earlier draws (counter-based).

The random number for prompt r at position t depends only on (seed, r, t, purpose, index), so it is
the same on every rank, in every batch and under every strategy. The generator is numpy's ``Philox``
(Philox4x64-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the key
(seed, r); for each purpose and index, consecutive positions get consecutive outputs.
"""

from enum import IntEnum
from functools import lru_cache

import numpy as np

from specdec.types import FloatArray, IntArray

_BLOCK = 256  # positions that are computed at once
_WORDS = 4  # draws per value of the generator's counter


class Purpose(IntEnum):
    """What a random number is used for; numbers of different purposes are independent.

    ``TARGET``: the target's next token, including the bonus token. ``DRAFT``: a draft's candidate.
    ``ACCEPT``: the acceptance test of a candidate. ``RESIDUAL``: the token after rejections.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@lru_cache(maxsize=4096)  # 8 MiB
def _block_of(seed: int, prompt_id: int, purpose: Purpose, index: int, number: int) -> FloatArray:
    """Returns the random numbers of positions from ``number * _BLOCK`` on, float64[_BLOCK]."""
    key = np.array([seed % 2**64, prompt_id % 2**64], np.uint64)
    counter = np.array([number * _BLOCK // _WORDS, index, purpose, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(_BLOCK)


class KeyedDraws:
    """Uniform random numbers that depend only on seed, prompt id, position, purpose and index.

    The seed may be any integer; its low 64 bits are used.
    """

    def __init__(self, *, seed: int) -> None:
        self.seed = seed

    def uniform(
        self, prompt_id: int, positions: IntArray, purpose: Purpose, index: int | IntArray = 0
    ) -> FloatArray:
        """Returns numbers in [0, 1) for one prompt, float64, of the arguments' broadcast shape.

        ``positions`` are those of the tokens to be sampled: the token after a node at position p
        has position p + 1. ``index`` numbers siblings; an array broadcasts against ``positions``.
        """
        at, indices = np.broadcast_arrays(positions, index)
        numbers, draws = at // _BLOCK, np.empty(at.shape)
        for i, number in set(zip(indices.ravel().tolist(), numbers.ravel().tolist(), strict=True)):
            here = (indices == i) & (numbers == number)
            block = _block_of(self.seed, prompt_id, purpose, i, number)
            draws[here] = block[at[here] % _BLOCK]
        return draws
