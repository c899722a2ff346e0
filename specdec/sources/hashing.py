"""Hashes of integers under a seed, which serve as random numbers without a generator's state."""

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFFFFFFFFFFFFFF
# Constants of splitmix64 (Steele et al. 2014).
_GAMMA, _MIX_1, _MIX_2 = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SHIFTS = tuple(map(np.uint64, (30, 27, 31, 11)))


def hash_u64(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Hashes ``seed`` and the integers ``parts`` elementwise, with broadcasting.

    Applies splitmix64 to the seed and to each part in turn; the result, uint64, is uniform.
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        value = _mixed(np.uint64(int(seed) & _MASK))
        for part in parts:
            value = _mixed(value ^ np.asarray(part).astype(np.uint64))
    return value


def as_uniform(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Maps hashes to float64 in [0, 1) with 53 random bits."""
    return (hashes >> _SHIFTS[3]).astype(np.float64) * 2.0**-53


def hash_uniform(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return as_uniform(hash_u64(seed, *parts))


def _mixed(value: Any) -> Any:
    value = value + _GAMMA
    value = (value ^ (value >> _SHIFTS[0])) * _MIX_1
    value = (value ^ (value >> _SHIFTS[1])) * _MIX_2
    return value ^ (value >> _SHIFTS[2])
