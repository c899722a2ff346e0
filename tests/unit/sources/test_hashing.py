"""Hashes of integers: several streams at once are those of single calls, and look random."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.sources.hashing import (
    as_hashes,
    as_uniform,
    hash_streams,
    hash_u64,
    hash_uniform,
)


@pytest.mark.parametrize("seed", [0, 1, -3, 2**70])
@pytest.mark.parametrize("request_id", [0, 17, 2**40])
def test_streams_are_single_hashes(seed: int, request_id: int) -> None:
    positions, tokens = np.arange(50), np.arange(50)[::-1] * 7
    both = hash_streams(seed, (3, 8), request_id, positions, tokens)
    for row, stream in zip(both, (3, 8), strict=True):
        assert (row == hash_u64(seed, stream, request_id, positions, tokens)).all()
    again = hash_streams(seed, (3, 8), request_id, positions, tokens)
    assert (again == both).all(), "the stored keys are not changed"
    here = hash_streams(seed, (3, 8), request_id, 12, tokens)
    assert (here == hash_streams(seed, (3, 8), request_id, np.full(50, 12), tokens)).all()
    uniform = hash_uniform(seed, 8, request_id, positions, tokens)
    assert (as_uniform(both[1]) == uniform).all()


def test_uniform_numbers_are_uniform_and_independent() -> None:
    """Bounds are 4.5 standard deviations: each fails by chance once in 150,000 times."""
    num = 20_000
    first, second = as_uniform(hash_streams(5, (1, 2), 0, np.arange(num)))
    for drawn in (first, second):
        assert 0.0 <= drawn.min() < drawn.max() < 1.0
        assert abs(drawn.mean() - 0.5) < 4.5 / np.sqrt(12 * num)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / np.sqrt(num)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 4.5 / np.sqrt(num)


def test_hashes_compare_with_limits_as_their_uniform_numbers_do() -> None:
    """Exactly, also one below, at and one above each limit; a limit that is 1 ulp off is seen."""
    rng = np.random.default_rng(0)
    limits = np.sort(np.concatenate([rng.random(50), [0.0, 0.4, 0.7, 1.0 - 2.0**-53]]))
    edges = as_hashes(limits)
    hashes = rng.integers(0, 2**64, 10_000, dtype=np.uint64)
    hashes = np.concatenate([hashes, edges, edges - np.uint64(1), edges + np.uint64(1)])
    expected = limits.searchsorted(as_uniform(hashes), side="right")
    assert (edges.searchsorted(hashes, side="right") == expected).all()
    wrong = as_hashes(limits + 2.0**-53)
    assert (wrong.searchsorted(hashes, side="right") != expected).any()
    assert as_hashes(np.array([1.0]))[0] == np.iinfo(np.uint64).max
