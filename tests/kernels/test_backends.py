"""Attention kernels and fused modules inside a runner, and their error messages."""

import sys
import types

import numpy as np
import pytest
import torch

from specdec.attention import support
from specdec.attention.backends import (
    attention_kernel,
    auto_attention,
    flash_attention,
)
from specdec.attention.tree_attention import Visibility
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models.execution import Execution
from specdec.models.random import random_model
from specdec.models.runner import ModelRunner
from specdec.types import TreeRows
from tests.kernels import reference

CPU = torch.device("cpu")
REPLAY = Execution(graphs="replay")
needs_triton = pytest.mark.skipif(
    support.triton_problem(CPU, torch.float32) is not None, reason="Triton is not installed"
)


def _logits(model, **kwargs):
    """Logits of a prompt with its first root, then of a tree of 5 nodes below it."""
    runner = ModelRunner(model=model, name="target", meter=Meter(), **kwargs)
    cache = runner.new_cache(8)
    tokens = np.arange(3, 14)
    tree = TreeRows.within(
        prefix_len=11,
        node_ids=np.arange(6),
        tokens=np.array([9, 5, 6, 7, 8, 9]),
        parent_ids=np.array([-1, 0, 0, 1, 3, 2]),
    )
    rows = cache.rows(prefix_tokens=tokens, tree=tree.take(np.arange(1)))
    first = runner.forward([rows]).logits
    rows = cache.rows(tree=tree.take(np.arange(1, 6)))
    return torch.cat([first, runner.forward([rows]).logits])


@pytest.mark.slow
@pytest.mark.parametrize("execution", [Execution(), REPLAY], ids=["plain", "static"])
@needs_triton
def test_the_kernel_in_a_runner(execution):
    """The same logits as dense attention, in plain passes and over static buffers."""
    model = random_model("llama", num_layers=2, scale=0.1)
    expected = _logits(model)
    found = _logits(model, attention="triton", execution=execution)
    bound = 50 * torch.finfo(model.dtype).eps  # some dozens of roundings of values near one
    assert (found - expected).abs().max() < bound


@needs_triton
def test_windows_and_caps_stay_with_torch():
    """Layers that the kernel does not support use dense attention."""
    model = random_model("gemma2", num_layers=2, scale=0.1, options={"sliding_window": 6})
    expected = _logits(model)
    for execution in (Execution(), REPLAY):
        found = _logits(model, attention="triton", execution=execution)
        assert (found - expected).abs().max() < 1e-5


@needs_triton
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_swiglu_in_a_runner(family):
    """In place of the family's own modules; prompts of more rows than the kernel's take these."""
    model = random_model(family, num_layers=2, scale=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = _logits(model, execution=Execution(kernels="triton"))
    assert (found - _logits(model)).abs().max() < 1e-5
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("first", "causal"), [(0, False), (1, False), (14, False), (14, True)])
def test_flash_attention(first, causal, monkeypatch):
    """A tree's prefix and the merge, or all of a prompt's chunk.

    With a substitute that follows flash-attn's documentation: a causal mask is aligned at the last
    row and the last slot.
    """
    calls = []

    def with_kvcache(q, k, v, *, cache_seqlens, softmax_scale, causal, return_softmax_lse):
        assert return_softmax_lse
        length = int(cache_seqlens)
        calls.append(length)
        q, k, v = (t.transpose(1, 2) for t in (q, k[:, :length], v[:, :length]))
        scores = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT * softmax_scale
        if causal:
            later = torch.ones(scores.shape[-2:]).triu(length - q.shape[2] + 1).bool()
            scores = scores.masked_fill(later, -torch.inf)
        lse = scores.logsumexp(-1) if length else scores.new_full(scores.shape[:-1], torch.inf)
        found = scores.softmax(-1) @ v.unsqueeze(2)
        return found.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)

    fake = types.ModuleType("flash_attn")
    fake.flash_attn_with_kvcache = with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 4, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, 40, 8, generator=generator)
    visible = torch.rand(4, 16, generator=generator) < 0.5
    visible[:, 0] = True
    end = first + 9
    if causal:
        end, visible = first + 4, torch.ones(4, 16).tril().bool()
    seen = Visibility(
        lengths=torch.tensor([first, end]),
        visible=visible.to(torch.uint8),
        num_slots=40,
        dtype=torch.float32,
        causal=causal,
    )
    found = flash_attention(query, key, value, seen, 0.3)
    expected = reference.tree_attention(
        query, key, value, first=first, end=end, visible=visible, scaling=0.3
    )
    assert (found - expected).abs().max() < 1e-5
    assert calls == [end if causal else first]


def test_automatic_attention_splits_the_context_where_it_can(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda name: name)
    for device, dtype, expected in (
        ("cuda", torch.bfloat16, "triton"),
        ("cuda", torch.float64, "dense"),  # which the kernel does not compute in
        ("cpu", torch.float32, "dense"),
    ):
        assert auto_attention(torch.device(device), dtype) == expected
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    assert auto_attention(torch.device("cuda"), torch.bfloat16) == "dense"


def test_refusals_name_the_remedy(monkeypatch):
    with pytest.raises(UserError, match=r"model.attention=cutlass is unknown; choose dense"):
        attention_kernel("cutlass", CPU, torch.float32)
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"triton cannot run here: .*pip install triton"):
        attention_kernel("triton", CPU, torch.float32)
    with pytest.raises(UserError, match=r"flash cannot run here: .*pip install flash-attn"):
        attention_kernel("flash", CPU, torch.bfloat16)
    monkeypatch.setattr(support, "find_spec", lambda name: name)
    with pytest.raises(UserError, match="flash-attn runs on CUDA devices, not on 'cpu'"):
        attention_kernel("flash", CPU, torch.bfloat16)
    assert "float16 or bfloat16" in support.flash_problem("cuda", torch.float32)
    assert "not in float64" in support.triton_problem("cuda", torch.float64)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in support.triton_problem(CPU, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "float32 only" in support.triton_problem(CPU, torch.bfloat16)
    assert support.triton_problem(CPU, torch.float32) is None
