"""Quantised weights of ONNX Runtime's MatMulNBits: blocks of 32 inputs with one scale each.

A weight is scale * code, with codes from -2^(bits - 1) to 2^(bits - 1) - 1. The value of largest
magnitude in a block has the lowest code, so that rounding a rounded matrix changes nothing.

Shape letters: N outputs, K inputs, B = ceil(K / 32) blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 32
# Names, in modules and graphs, of the matrices whose weights have 8 bits even in int4 models. Those
# of the second group have them in every third layer.
_WIDE = ("lm_head", "output", "down_proj", "down")
_WIDE_OF_THIRD = ("q_proj", "k_proj", "v_proj", "qkv")
_ROWS = 8192  # rows of a matrix that are quantised at once, to bound memory


def bits_of(name: str, bits: int) -> int:
    """Returns the bits per weight of the matrix ``name``: 8 for output heads, down projections and
    the attention inputs of every third layer, which cause most of the quality loss of int4
    (experiments/log/2026-12-01-int4.md), and ``bits`` for all other matrices.
    """
    *path, leaf = name.split(".")
    layer = next((int(part) for part in path if part.isdecimal()), 0)
    return 8 if leaf in _WIDE or (leaf in _WIDE_OF_THIRD and layer % 3 == 2) else bits


def packed(weight: Tensor, bits: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Packs a weight matrix [N, K] for MatMulNBits; returns codes uint8[N, B, 4 * bits] and scales
    float32[N, B]. Codes are stored unsigned, with 2^(bits - 1) added; of two 4-bit codes in a byte,
    the first has the low bits.
    """
    parts = [_blocks(rows, bits) for rows in weight.split(_ROWS)]
    codes = torch.cat([(codes + 2 ** (bits - 1)).to(torch.uint8) for codes, _ in parts])
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous().numpy(), torch.cat([scales[..., 0] for _, scales in parts]).numpy()


def rounded(weight: Tensor, bits: int) -> Tensor:
    parts = [codes * scales for codes, scales in (_blocks(r, bits) for r in weight.split(_ROWS))]
    return torch.cat(parts).flatten(1)[:, : weight.shape[1]].to(weight.dtype)


def _blocks(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantises a matrix [N, K]: returns signed codes [N, B, 32] and scales [N, B, 1] as floats."""
    values = pad(weight.detach().float(), (0, -weight.shape[1] % BLOCK))
    blocks, half = values.reshape(len(values), -1, BLOCK), 2 ** (bits - 1)
    scales = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -half
    codes = (blocks / scales).nan_to_num(0.0).round()  # 0 / 0 in a block of zeros
    return codes.clamp(-half, half - 1), scales


def round_weights(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Rounds the weights of all linear layers in place, except those on the meta device, to values
    that ``packed`` stores without a further error. A tied output head is untied from the embedding.
    """
    for name, module in model.named_modules():
        matrix = module.weight if isinstance(module, nn.Linear) else None
        for parameter in module.parameters(recurse=False):
            if parameter is not matrix:  # one that is a view of the file keeps all of it in memory
                parameter.data = parameter.data.clone()
        if matrix is not None and not matrix.is_meta:
            module.weight = nn.Parameter(rounded(matrix, bits_of(name, bits)), requires_grad=False)
    return model


def num_bytes(model: nn.Module, bits: int | None = None) -> int:
    """Returns the bytes of a model's weights, tied ones once. ``bits`` is the size per weight of
    linear layers that ONNX Runtime quantises; None: they have the model's dtype.
    """
    if bits is None:
        return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    total, seen = 0, set[int]()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear) and name == "weight":
                blocks = len(parameter) * -(-parameter.shape[1] // BLOCK)
                total += blocks * (BLOCK * bits_of(module_name, bits) // 8 + 4)
            elif id(parameter) not in seen:
                seen.add(id(parameter))
                total += parameter.numel() * parameter.element_size()
    return total
