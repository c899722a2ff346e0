"""Draws over static buffers equal draws without them, independent of earlier draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.sampling import captured, on_device
from specdec.sampling.captured import StaticDraws
from specdec.sampling.transform import SamplingParams, SamplingTransform

VOCABULARY = 130
KINDS = (
    {"temperature": 0.8, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.6, "top_k": 80, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "top_p": 1.0},
)


def _logits(num: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype) * 3


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_draws_are_the_transforms_own(kind):
    """Numbers of rows at and between the captured counts, two types, and reused buffers."""
    static = StaticDraws(graphs="replay")
    for seed, num in enumerate((1, 3, 64, 5, 3)):
        for dtype in (torch.float64, torch.float32):
            logits, draws = _logits(num, seed, dtype), np.random.default_rng(seed).random(num)
            found = static.sample(logits, draws, **kind)
            expected = on_device.sample(logits, draws, **kind)
            np.testing.assert_array_equal(found, expected)
    assert static.replays == 10
    assert len(static._launches) == 8  # 1, 4, 8 and 64 rows of each type


def test_the_buffers_are_what_is_read(monkeypatch):
    """Control: draws use the uniforms in the buffers."""
    static = StaticDraws(graphs="replay")
    logits = _logits(4, 0)
    draws = [np.full(4, value) for value in (0.05, 0.95)]
    found = [static.sample(logits, each, **KINDS[0]) for each in draws]
    assert (found[0] < found[1]).all()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *args, **kwargs: self)
    np.testing.assert_array_equal(static.sample(logits, draws[0], **KINDS[0]), found[1])


def test_other_draws_run_uncaptured(monkeypatch):
    """A top-p cut beyond the searched entries; more transforms than the limit; many rows."""
    kind = {"temperature": 1.0, "top_k": 0, "top_p": 0.99}
    flat, draws = _logits(3, 1) * 0.01, np.array([0.1, 0.5, 0.9])
    expected = on_device.sample(flat, draws, **kind)
    monkeypatch.setattr(captured, "NUCLEUS", 8)
    static = StaticDraws(graphs="replay")
    np.testing.assert_array_equal(static.sample(flat, draws, **kind), expected)
    monkeypatch.setattr(captured, "_MAX_KINDS", 1)
    np.testing.assert_array_equal(
        static.sample(flat, draws, **KINDS[0]), on_device.sample(flat, draws, **KINDS[0])
    )
    assert static.replays == len(static._launches) == 1
    assert not static.serves(_logits(65, 0))
    assert not StaticDraws(graphs="off").serves(flat)
    assert not StaticDraws(graphs="auto").serves(flat)  # on a CPU
    with pytest.raises(ValueError, match="largest logit of a row is nan"):
        static.sample(torch.full_like(flat, torch.nan), draws, **kind)


def test_the_sampling_transform_goes_through_them():
    """If given and applicable; greedy rows have no draw."""
    static = StaticDraws(graphs="replay")
    logits, draws = _logits(3, 2), np.array([0.2, 0.4, 0.6])
    for params, replays in ((SamplingParams(temperature=0.8), 1), (SamplingParams(), 1)):
        found = SamplingTransform(params, static=static).sample(logits, draws)
        np.testing.assert_array_equal(found, SamplingTransform(params).sample(logits, draws))
        assert static.replays == replays
