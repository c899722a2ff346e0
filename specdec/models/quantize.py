"""Weight-only quantisation of a model's linear layers by torchao (SwiftSpec 5).

Only the decoder layers' matrices are quantised, not the embeddings and the output head; arithmetic
uses the activations' type. Losslessness of a quantised target is measured against plain decoding of
the same quantised model.
"""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.models.slicing import layers_name

GROUP_SIZES = (128, 64, 32)
"""Weights per scale in int4: the first of these that divides a matrix's number of inputs."""


class Quantization(StrEnum):
    """Weight formats: as loaded; 8 bits with a scale per row; 4 bits with a scale per group."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


def quantize(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Quantises the decoder layers' linear layers in place, except those on the meta device.

    Args:
        model: float32, bfloat16 or float16.
        kind: a value of ``Quantization``.

    Returns:
        ``model``.

    Raises:
        UserError: for an unknown kind, a missing library, or a model that cannot be quantised.
    """
    if kind not in list(Quantization):
        raise UserError(f"model.quantization={kind} is unknown; choose {', '.join(Quantization)}")
    if kind == Quantization.NONE:
        return model
    setting = f"model.quantization={kind}"
    if find_spec("torchao") is None:
        raise UserError(f"{setting} needs torchao: pip install torchao, or use none")
    if model.dtype == torch.float64:
        raise UserError(f"{setting} needs model.dtype float32, bfloat16 or float16, not float64")
    prefix = f"{layers_name(model)}."
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(prefix) and not module.weight.is_meta
    ]
    if not linears:
        raise UserError(
            f"{setting} finds no plain linear layers in model type {model.config.model_type!r};"
            " use none, or a family such as llama or qwen3"
        )
    from torchao.quantization import quantize_

    sizes = {name: _group_size(module.in_features, kind, setting) for name, module in linears}
    for group_size in dict.fromkeys(sizes.values()):
        chosen = {name for name, size in sizes.items() if size == group_size}
        config = _config(kind, group_size, model)
        try:
            quantize_(model, config, filter_fn=lambda _, name, chosen=chosen: name in chosen)
        except (ImportError, AssertionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{setting} is not supported by torchao on {model.device} in {model.dtype}"
                f" ({error}); try model.dtype=bfloat16, another kind, or none"
            ) from error
    return model


def num_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters as stored in memory, also of quantised ones."""
    return sum(_stored_bytes(parameter.data) for parameter in model.parameters())


def _stored_bytes(tensor: Tensor) -> int:
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is None or type(tensor) is Tensor:
        return tensor.numel() * tensor.element_size()
    return sum(_stored_bytes(getattr(tensor, name)) for name in parts()[0])


def _group_size(inputs: int, kind: str, setting: str) -> int:
    """Weights per scale; 0: one scale per row."""
    fitting = [size for size in GROUP_SIZES if inputs % size == 0]
    if kind != Quantization.INT8 and not fitting:
        raise UserError(
            f"{setting} needs matrices whose inputs are multiples of {GROUP_SIZES[-1]}, not"
            f" {inputs}; use int8 or none"
        )
    return 0 if kind == Quantization.INT8 else fitting[0]


def _config(kind: str, group_size: int, model: PreTrainedModel) -> Any:
    """torchao's configuration; on the CPU, without an int4 kernel, a weight takes a byte."""
    from torchao.quantization import (
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    if kind == Quantization.INT8:
        return Int8WeightOnlyConfig()
    if model.device.type == "cuda":
        return Int4WeightOnlyConfig(group_size=group_size, int4_packing_format="tile_packed_to_4d")
    bits: Any = torch.int4  # type: ignore[attr-defined]
    return IntxWeightOnlyConfig(weight_dtype=bits, granularity=PerGroup(group_size))
