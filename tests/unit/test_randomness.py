"""Keyed draws: the generator against published vectors, and the cache against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specdec.sampling import keyed_draws as randomness
from specdec.sampling.keyed_draws import KeyedDraws, Purpose, keyed_uniforms, philox4x32

FALSE_ALARM = 1e-6

# Random123's known-answer file, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000")
    + ("6627e8d5 e169c58d bc57ac4c 9b00dbd8",),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff")
    + ("408f276d 41c83b0e a20bc7c6 6d5451fd",),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0")
    + ("d16cfe09 94fdcceb 5001e420 24126ea1",),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al. 2011, section 3, in Python integers."""
    for i in range(10):
        k0 = (key[0] + i * 0x9E3779B9) % 2**32
        k1 = (key[1] + i * 0xBB67AE85) % 2**32
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            right // 2**32 ^ counter[1] ^ k0,
            right % 2**32,
            left // 2**32 ^ counter[3] ^ k1,
            left % 2**32,
        ]
    return counter


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter, key, expected):
    arrays = tuple(np.array([word], np.uint64) for word in words(counter))
    result = [int(word[0]) for word in philox4x32(arrays, tuple(words(key)))]
    assert result == words(expected) == philox_by_hand(words(counter), words(key))


def test_draws_are_the_top_53_bits_of_the_keyed_block():
    """Pins the key layout: another layout would change every stored result."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        seed, prompt = (int(v) for v in rng.integers(-(2**62), 2**62, 2))
        position, index = int(rng.integers(0, 2**32)), int(rng.integers(0, 2**24))
        purpose = Purpose(int(rng.integers(4)))
        counter = [position, purpose << 24 | index, prompt % 2**32, (prompt >> 32) % 2**32]
        high, low, _, _ = philox_by_hand(counter, [seed % 2**32, (seed >> 32) % 2**32])
        expected = (high * 2**32 + low >> 11) / 2**53
        assert keyed_uniforms(seed, prompt, position, purpose, index) == expected


def test_cached_draws_equal_their_definition_in_any_order_of_asking(monkeypatch):
    monkeypatch.setattr(randomness, "_MAX_TABLES", 5)
    draws = KeyedDraws(seed=-7)
    rng = np.random.default_rng(1)
    for _ in range(600):
        prompt = int(rng.choice([0, 1, -1, 2**40, 12345]))
        purpose = Purpose(int(rng.integers(4)))
        start = int(rng.choice([0, 1, 250, 255, 256, 511, 1000, 5000, 2**31]))
        positions = start + rng.integers(0, int(rng.choice([1, 8, 300, 3000])), rng.integers(1, 6))
        index = int(rng.choice([0, 1, 2, 5, 31, 1000]))
        expected = keyed_uniforms(-7, prompt, positions, purpose, index)
        np.testing.assert_array_equal(draws.uniform(prompt, positions, purpose, index), expected)
        table = draws.uniform(prompt, positions[:, None], purpose, np.arange(index % 7 + 1))
        expected = keyed_uniforms(-7, prompt, positions[:, None], purpose, np.arange(index % 7 + 1))
        np.testing.assert_array_equal(table, expected)
    assert len(draws._tables) <= 5
    assert draws.uniform(3, np.zeros(0, np.int64), Purpose.TARGET).shape == (0,)


def test_two_users_a_few_positions_apart_share_a_table(monkeypatch):
    """A source that uses the target's draws is ahead of it across a block border."""
    draws = KeyedDraws(seed=1)
    computed = []
    real = randomness.keyed_uniforms
    monkeypatch.setattr(randomness, "keyed_uniforms", lambda *a: computed.append(a) or real(*a))
    for position in range(200, 500):
        for ahead in (0, 6):
            draws.uniform(0, np.array([position + ahead]), Purpose.TARGET)
    assert len(computed) == 3  # the first, then one of each user at a table's end


def test_draws_are_uniform_and_different_keys_are_independent():
    """Chi-square over 64 cells, and over 8 x 8 cells for pairs of keys that differ in one part."""
    num = 40_000
    base = {"seed": 1, "prompt_ids": 3, "positions": np.arange(num), "purpose": Purpose.ACCEPT}
    draws = keyed_uniforms(**base)
    others = [
        keyed_uniforms(**base | change)
        for change in (
            {"seed": 2},
            {"seed": 1 + 2**32},
            {"prompt_ids": 4},
            {"prompt_ids": 3 + 2**32},
            {"positions": np.arange(num) + 1},
            {"purpose": Purpose.DRAFT},
            {"index": 1},
        )
    ]
    cells = np.bincount((draws * 64).astype(int), minlength=64)
    assert stats.chisquare(cells).pvalue > FALSE_ALARM
    for other in others:
        pairs = (draws * 8).astype(int) * 8 + (other * 8).astype(int)
        assert stats.chisquare(np.bincount(pairs, minlength=64)).pvalue > FALSE_ALARM / len(others)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
