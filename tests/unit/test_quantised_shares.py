"""Shares of a quantised model: the whole model's integers and scales, at any degree."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.loading import load_model
from specdec.models.quantize import (
    quantize,
    sharded,
    share_plan,
)
from specdec.models.random import random_model
from specdec.models.slicing import shared_copy
from specdec.tensor_parallel.collective import Collective
from specdec.tensor_parallel.cuts import HeadSplit, Piece, whole_groups
from tests.pretrained import pretrained
from tests.stored import stored_parts

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None,
    reason="torchao is not installed",
)

KINDS = ["int8", "int4"]

SIZES: dict[str, dict[str, Any]] = {
    # Groups of 64 inputs in o_proj, of which a rank's heads have 32 or 16.
    "divided groups": {"hidden_size": 64},
    # Groups of 128 inputs in o_proj are two heads; 3 ranks are padded.
    "whole groups": {"hidden_size": 128, "options": {"head_dim": 64, "intermediate_size": 384}},
    # Three query heads per key/value head, of which 4 ranks have two, or one and one of zeros.
    "padded heads": {"hidden_size": 96, "num_heads": 6, "num_kv_heads": 2},
}


def model_of(size: str, **given: Any) -> PreTrainedModel:
    return random_model("llama", num_layers=2, scale=0.1, **{**SIZES[size], **given})


def plain(parameter: Tensor) -> Tensor:
    """The weight as a plain tensor: dequantised if it is quantised."""
    return parameter.dequantize() if hasattr(parameter, "__tensor_flatten__") else parameter


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", sorted(SIZES))
def test_shares_have_the_values_of_the_whole(size: str, kind: str) -> None:
    """Exactly, also where they are zeros of padding; only the layers' matrices are quantised."""
    model = model_of(size, dtype="bfloat16")
    whole = dict(quantize(model_of(size, dtype="bfloat16"), kind).named_parameters())
    for degree in (2, 3, 4, 5):
        for rank in range(degree):
            group = Collective(rank=rank, size=degree)
            cuts, formats = share_plan(shared_copy(model), group, kind)
            share = dict(sharded(model, group, kind).named_parameters())
            assert share.keys() == whole.keys()
            for name, parameter in share.items():
                expected = plain(whole[name])
                if name in cuts:
                    expected = cuts[name].of(expected, expected.dtype)
                assert torch.equal(plain(parameter), expected), f"{name}, {rank} of {degree}"
                assert hasattr(parameter, "__tensor_flatten__") == (name in formats), name


@pytest.mark.parametrize("heads", [(4, 2), (14, 2), (3, 1)])
@pytest.mark.parametrize("head_size", [16, 64])
def test_whole_groups_multiply_only_a_ranks_own_inputs(
    heads: tuple[int, int], head_size: int
) -> None:
    """Whatever padded heads contain: the ranks' products add up to the product, in integers."""
    num_heads, num_kv_heads = heads
    inputs = num_heads * head_size
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randint(-9, 9, (2, inputs), generator=generator)
    for degree in (2, 3, 4, 5, 7):
        for group_size in (size for size in (16, 32, 64, 128) if inputs % size == 0):
            total = 0
            for rank in range(degree):
                split = HeadSplit.of(num_heads, num_kv_heads, rank=rank, size=degree)
                pieces = tuple(piece.times(head_size) for piece in split.query)
                own = torch.cat([_with_padding(hidden, piece, 1000) for piece in pieces])
                extended = whole_groups(pieces, inputs, group_size)
                if extended is None:
                    share = torch.cat([_with_padding(weight, piece, 0) for piece in pieces])
                    assert len(share) % group_size == 0
                else:
                    assert all(not p.pad and p.start % group_size == 0 for p in extended.pieces)
                    share = torch.cat([weight[p.start : p.stop] for p in extended.pieces])
                    own = torch.cat([own, torch.zeros(1, dtype=own.dtype)])[extended.source]
                total += int(share @ own)
            assert total == int(weight @ hidden), (degree, group_size)


def _with_padding(values: Tensor, piece: Piece, padding: int) -> Tensor:
    return torch.cat([values[piece.start : piece.stop], torch.full((piece.pad,), padding)])


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", sorted(SIZES))
def test_a_share_that_is_read_equals_one_cut_in_memory(
    size: str, kind: str, tmp_path: Path
) -> None:
    model = model_of(size)
    model.save_pretrained(tmp_path)
    whole = load_model(tmp_path, layers=(0, 2), quantization=kind)
    _check_equal(whole, quantize(load_model(tmp_path), kind))
    for rank in range(3):
        group = Collective(rank=rank, size=3)
        read = load_model(tmp_path, layers=(0, 2), group=group, quantization=kind)
        _check_equal(read, sharded(model, group, kind))
        _check_equal(read, pretrained(tmp_path, quantization=kind).share("target", group, (0, 2)))


def _check_equal(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    parameters = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        assert type(parameter) is type(parameters[name])
        pairs = zip(stored_parts(parameter), stored_parts(parameters[name]), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in found.named_buffers())
