"""Hashes of integers are keyed, and look random."""

import numpy as np

from specdec.sources.hashing import hash_u64, hash_uniform


def test_scalars_and_arrays_of_any_shape_have_the_same_hashes() -> None:
    streams, positions = np.array([[3], [8]]), np.arange(50)
    both = hash_u64(2**70, streams, 17, positions, positions[::-1] * 7)
    for row, stream in zip(both, (3, 8), strict=True):
        assert row[5] == hash_u64(2**70, stream, 17, 5, 44 * 7)
        assert (row == hash_u64(2**70, stream, 17, positions, positions[::-1] * 7)).all()
    assert (both != hash_u64(2**70 + 1, streams, 17, positions, positions[::-1] * 7)).all()


def test_uniform_numbers_are_uniform_and_independent() -> None:
    """Bounds are 4.5 standard deviations: each fails by chance once in 150,000 times."""
    num = 20_000
    first, second = hash_uniform(5, np.array([[1], [2]]), 0, np.arange(num))
    for drawn in (first, second):
        assert 0.0 <= drawn.min() < drawn.max() < 1.0
        assert abs(drawn.mean() - 0.5) < 4.5 / np.sqrt(12 * num)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / np.sqrt(num)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 4.5 / np.sqrt(num)
