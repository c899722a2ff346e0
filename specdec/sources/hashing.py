"""Keyed hashes of integers, used as random values without generator state."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFFFFFFFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15  # odd constant of splitmix64 (Steele et al. 2014)
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Created once, because creating numpy scalars is slow.
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31))
_FACTORS = np.uint64(_MIX_1), np.uint64(_MIX_2)
_STEP = np.uint64(_GAMMA)
_HALF_BITS = np.uint64(11)


def hash_u64(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Hashes integers elementwise, with broadcasting: splitmix64 folded over the parts.

    The result, uint64, is uniform over 64 bits.
    """
    leading = 0
    while leading < len(parts) and isinstance(parts[leading], int | np.integer):
        leading += 1
    value = np.array(_key(int(seed), *map(int, parts[:leading])), np.uint64)  # type: ignore[arg-type]
    for part in parts[leading:]:
        value = _finish(value ^ np.asarray(part).astype(np.uint64))
    return value


def as_uniform(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Maps hashes to float64 in [0, 1) with 53 random bits."""
    return (hashes >> _HALF_BITS).astype(np.float64) * 2.0**-53


def hash_uniform(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return as_uniform(hash_u64(seed, *parts))


@lru_cache(maxsize=4096)
def _key(seed: int, *parts: int) -> int:
    """Hashes the leading scalars; the result is cached, since most calls begin with the same."""
    value = _finish_int(seed & _MASK)
    for part in parts:
        value = _finish_int(value ^ (part & _MASK))
    return value


def _finish_int(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _finish(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Applies ``_finish_int`` to an array; arithmetic on uint64 arrays is modulo 2^64."""
    value = np.array(value, ndmin=1) if (scalar := value.ndim == 0) else value
    value += _STEP
    value ^= value >> _SHIFTS[0]
    value *= _FACTORS[0]
    value ^= value >> _SHIFTS[1]
    value *= _FACTORS[1]
    value ^= value >> _SHIFTS[2]
    return value.reshape(()) if scalar else value
