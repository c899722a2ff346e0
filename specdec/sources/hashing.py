"""Keyed hashes of integers: random values without generator state."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = 0x9E3779B97F4A7C15  # odd constant of splitmix64 (Steele et al. 2014)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def hash_u64(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Elementwise keyed hash of integers: splitmix64 folded over the parts.

    Args:
        seed: the key, any integer.
        parts: integer arrays or scalars, broadcast against each other.

    Returns:
        uint64 of the broadcast shape, uniform over 64 bits.
    """
    value: npt.NDArray[np.uint64] = np.array(seed & 0xFFFFFFFFFFFFFFFF, np.uint64)
    value = _finish(value)
    for part in parts:
        value = _finish(value ^ np.asarray(part).astype(np.uint64))
    return value


def hash_uniform(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """``hash_u64`` as float64 in [0, 1) with 53 random bits."""
    return (hash_u64(seed, *parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _finish(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        value = value + np.uint64(_GAMMA)
        value = (value ^ (value >> np.uint64(30))) * _MIX_1
        value = (value ^ (value >> np.uint64(27))) * _MIX_2
        return value ^ (value >> np.uint64(31))
