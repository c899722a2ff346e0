"""Keyed draws: the generator against published vectors, and draws against the oracle's."""

import numpy as np
import pytest
from scipy import stats

from specdec.certify.oracle import philox, reference_draw
from specdec.sampling.keyed_draws import KeyedDraws, Purpose

FALSE_ALARM = 1e-6

# Random123's known-answer file, philox4x64 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (2**64 - 1,) * 4,
        (2**64 - 1,) * 2,
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_the_oracles_generator_gives_the_published_vectors(counter, key, expected):
    assert philox(counter, key) == expected


def test_draws_are_the_oracles_in_any_order_of_calls():
    """Pins the key layout: another layout would change every stored result."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        seed = int(rng.choice([0, 7, -7, 2**32 + 7, 2**63 + 5]))
        prompt = int(rng.choice([0, 1, -1, 2**40, 12345]))
        purpose = Purpose(int(rng.integers(4)))
        start = int(rng.choice([0, 1, 250, 255, 256, 511, 1000, 2**31]))
        positions = start + rng.integers(0, int(rng.choice([1, 8, 300, 3000])), rng.integers(1, 6))
        siblings = rng.integers(0, int(rng.choice([1, 5, 1000])), (rng.integers(1, 4), 1))
        found = KeyedDraws(seed=seed).uniform(prompt, positions, purpose, siblings)
        expected = [
            [reference_draw(seed, prompt, int(at), purpose, int(i)) for at in positions]
            for i in siblings[:, 0]
        ]
        np.testing.assert_array_equal(found, expected)
    nothing = KeyedDraws(seed=1).uniform(3, np.zeros(0, np.int64), Purpose.TARGET)
    assert nothing.shape == (0,)


def test_draws_are_uniform_and_different_keys_are_independent():
    """Chi-square over 64 cells, and over 8 x 8 cells for pairs of keys that differ in one part."""
    num = 40_000

    def drawn(seed=1, prompt=3, first=0, purpose=Purpose.ACCEPT, index=0):
        return KeyedDraws(seed=seed).uniform(prompt, np.arange(first, first + num), purpose, index)

    draws = drawn()
    others = [
        drawn(seed=2),
        drawn(seed=1 + 2**32),
        drawn(prompt=4),
        drawn(prompt=3 + 2**32),
        drawn(first=1),
        drawn(purpose=Purpose.DRAFT),
        drawn(index=1),
    ]
    cells = np.bincount((draws * 64).astype(int), minlength=64)
    assert stats.chisquare(cells).pvalue > FALSE_ALARM
    for other in others:
        pairs = (draws * 8).astype(int) * 8 + (other * 8).astype(int)
        assert stats.chisquare(np.bincount(pairs, minlength=64)).pvalue > FALSE_ALARM / len(others)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
