"""The attention function: masks, packing, grouped heads, windows, and the two levels of Alg. 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.attention import backends
from specdec.attention.backends import masked_lse, two_level_attention
from specdec.attention.tree_attention import Visibility, capped_attention
from specdec.clocks.meter import Meter
from specdec.models.random import random_model
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.types import TreeRows
from tests.trees import grown

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}
# float64: order of sums; float32: 1e2 roundings of 1e-7 each, on outputs of about one


def _problem(dtype, *, heads=4, groups=2, rows=5, slots=23, split=14, seed=0):
    """Query, keys and values, a mask that is 0 before ``split``, and the expected output."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, heads, rows, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 1, groups, slots, 8, generator=generator, dtype=torch.float64)
    hidden = torch.rand(rows, slots, generator=generator) < 0.5
    hidden[:, :split] = False
    hidden[torch.arange(rows), torch.arange(split, split + rows)] = False  # a row sees itself
    scores = query @ key.repeat_interleave(heads // groups, 1).transpose(2, 3) * 8**-0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = weights @ value.repeat_interleave(heads // groups, 1)
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(rows, slots, dtype=dtype).masked_fill(hidden, lowest)
    return query.to(dtype), (key.to(dtype), value.to(dtype)), mask, expected


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_two_level_equals_one_softmax(dtype, heads, groups):
    """Merging by log-sum-exp is PipeDec Alg. 1's softmax over both parts."""
    query, stored, mask, expected = _problem(dtype, heads=heads, groups=groups)
    seen = Visibility(
        lengths=torch.tensor([14, mask.shape[1]]),
        visible=mask[:, 14:] == 0,
        num_slots=mask.shape[1],
        dtype=dtype,
        split=14,
    )
    result = two_level_attention(query, *stored, seen, None)
    assert (result - expected).abs().max() < TOLERANCE[dtype]


def test_two_level_without_the_cpu_kernel():
    """The implementation for other devices gives the same values."""
    query, stored, mask, expected = _problem(torch.float64)
    out, lse = masked_lse(query, *stored, mask == 0, None)
    kernel, kernel_lse = backends._attention_lse(query, *stored, mask, None)
    assert (out - expected).abs().max() < 1e-13
    assert (kernel - expected).abs().max() < 1e-13
    assert (kernel_lse - lse).abs().max() < 1e-13


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_capped_attention(softcap):
    """Attention in elementary operations against the formula, with and without a cap."""
    query, (key, value), mask, expected = _problem(torch.float64)
    if softcap is not None:
        scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5
        scores = torch.tanh(scores / softcap) * softcap + mask
        expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    scaling = None if softcap is None else 0.5
    result = capped_attention(query, key, value, mask, scaling, softcap)
    assert (result - expected).abs().max() < 1e-13


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", ["dense", "two_level"])
def test_packed_requests_equal_single_ones(family, kind):
    """Requests in one ragged pass do not see each other (SpecPipe-DB's batches)."""
    model = random_model(family, dtype="float64", num_layers=2, options={"sliding_window": 6})
    runner = ModelRunner(model=model, name="target", meter=Meter(), attention=kind)
    sizes = [(9, 7), (2, 1), (20, 3)]
    alone, together = [], []
    for seed, (prefix, nodes) in enumerate(sizes):
        rows = grown(runner, runner.new_cache(8), seed=seed, prefix=prefix, nodes=nodes)
        alone.append(runner.forward([rows]).logits)
        rows = grown(runner, runner.new_cache(8), seed=seed, prefix=prefix, nodes=nodes)
        together.append(rows)
    empty = runner.new_cache(1).rows()
    packed = runner.forward([together[0], empty, *together[1:]])
    assert (packed.logits - torch.cat(alone)).abs().max() < 1e-12
    again = [
        grown(runner, runner.new_cache(8), seed=seed, prefix=prefix, nodes=nodes)
        for seed, (prefix, nodes) in enumerate(sizes)
    ]
    wanted = np.array([8, 0, 3])
    some = runner.forward(again, logits_rows=wanted)
    assert (some.logits - packed.logits[wanted]).abs().max() < 1e-12


def test_two_level_is_taken(monkeypatch):
    """Only ``two_level`` calls the two-level implementation, in each layer of the tree's pass."""
    model = random_model("llama", num_layers=2)
    calls = []
    original = backends.two_level_attention
    monkeypatch.setattr(
        backends, "two_level_attention", lambda *a: calls.append(a[3].split) or original(*a)
    )
    for kind, expected in (("dense", 0), ("two_level", 2)):
        runner = ModelRunner(model=model, name="target", meter=Meter(), attention=kind)
        runner.forward([grown(runner, runner.new_cache(8))])
        assert sum(split > 0 for split in calls) == expected


def test_chunked_prefill_equals_whole():
    """A prompt in chunks of 5, and its first root in the last of them."""
    model = random_model("llama", dtype="float64", num_layers=2)
    runner = ModelRunner(model=model, name="target", meter=Meter())
    tokens = np.random.default_rng(0).integers(3, 61, 18)
    whole = runner.forward([runner.new_cache(4).rows(prefix_tokens=tokens)]).logits
    cache = runner.new_cache(4)
    for start in (0, 5, 10):
        rows = cache.rows(prefix_tokens=tokens[start : start + 5])
        assert runner.forward([rows], logits_rows=NO_ROWS).logits is None
    root = TreeRows.within(
        prefix_len=17, node_ids=np.array([17]), tokens=tokens[17:], parent_ids=np.array([-1])
    )
    rows = cache.rows(prefix_tokens=tokens[15:17], tree=root)
    assert (runner.forward([rows]).logits - whole[15:]).abs().max() < 1e-12
