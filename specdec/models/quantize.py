"""Weight-only quantisation of a model's linear layers by torchao (SwiftSpec 5).

Only the decoder layers' matrices are quantised; arithmetic uses the activations' dtype. One rank's
share of a matrix is cut first and has the integers and scales of the whole one, so together the
shares are the model of plain decoding; only sums over the ranks are added in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.models.slicing import layers_name, shared_copy

if TYPE_CHECKING:
    from specdec.tensor_parallel.collective import Collective
    from specdec.tensor_parallel.cuts import Cut

GROUP_SIZES = (128, 64, 32)
"""Weights per scale in int4: the first of these that divides a matrix's number of inputs."""
_BLOCK = 1024  # rows of a file's matrix that are read at once for their bounds


class Quantization(StrEnum):
    """Weight formats: as loaded; 8 bits with a scale per row; 4 bits with a scale per group."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one matrix is quantised; ``group_size`` inputs share a scale (0: all of a row)."""

    kind: Quantization
    group_size: int


def quantize(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Quantises the decoder layers' linear layers in place, except those on the meta device."""
    for name, form in weight_formats(model, kind).items():
        module = model.get_submodule(name.rpartition(".")[0])
        if not module.weight.is_meta:
            module.weight = quantized(module.weight, form)  # type: ignore[arg-type]
    return model


def weight_formats(model: PreTrainedModel, kind: str) -> dict[str, WeightFormat]:
    """Maps the name of each weight to quantise to its format, which depends on the whole weight's
    shape; the model may be on the meta device.
    """
    if kind not in list(Quantization):
        raise UserError(f"model.quantization={kind} is unknown; choose {', '.join(Quantization)}")
    if kind == Quantization.NONE:
        return {}
    setting = f"model.quantization={kind}"
    if find_spec("torchao") is None:
        raise UserError(f"{setting} needs torchao: pip install torchao, or use none")
    if model.dtype == torch.float64:
        raise UserError(f"{setting} needs model.dtype float32, bfloat16 or float16, not float64")
    prefix = f"{layers_name(model)}."
    formats = {
        f"{name}.weight": WeightFormat(Quantization(kind), scale_inputs(module.in_features, kind))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(prefix)
    }
    if not formats:
        raise UserError(
            f"{setting} finds no plain linear layers in model type {model.config.model_type!r};"
            " use none, or a family such as llama or qwen3"
        )
    return formats


def scale_inputs(inputs: int, kind: str) -> int:
    if kind != Quantization.INT4:
        return 0
    fitting = [size for size in GROUP_SIZES if inputs % size == 0]
    if not fitting:
        raise UserError(
            f"model.quantization={kind} needs matrices whose inputs are multiples of"
            f" {GROUP_SIZES[-1]}, not {inputs}; use int8 or none"
        )
    return fitting[0]


def quantized(weight: Tensor, form: WeightFormat, bounds: Tensor | None = None) -> nn.Parameter:
    """Quantises one matrix [O, I] (of whole groups), or a share of it, by torchao; ``form`` is that
    of the whole matrix.

    ``bounds`` [O, 2] has least and largest value of each row of the whole matrix, if ``weight`` has
    a share of the inputs and one scale per row. Returns a parameter without gradients, which owns
    its memory.
    """
    from torchao.quantization import quantize_

    inputs = weight.shape[1]
    if bounds is not None:  # as columns, so that torchao finds the whole row's scale
        weight = torch.cat([weight, bounds], 1)
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    try:
        quantize_(module, _config(form, weight.device))
    except (ImportError, AssertionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"model.quantization={form.kind} is not supported by torchao on {weight.device} in"
            f" {weight.dtype} ({error}); try model.dtype=bfloat16, another kind, or none"
        ) from error
    if bounds is None:
        return module.weight
    own = module.weight[:, :inputs].clone()  # a slice alone would keep all columns in memory
    return nn.Parameter(own, requires_grad=False)


def num_bytes(model: nn.Module) -> int:
    return sum(_stored_bytes(parameter.data) for parameter in model.parameters())


def _stored_bytes(tensor: Tensor) -> int:
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is None or type(tensor) is Tensor:
        return tensor.numel() * tensor.element_size()
    return sum(_stored_bytes(getattr(tensor, name)) for name in parts()[0])


def _config(form: WeightFormat, device: torch.device) -> Any:
    """Returns torchao's configuration; the CPU has no int4 kernel, so weights take a byte there."""
    from torchao.quantization import (
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    if form.kind == Quantization.INT8:
        return Int8WeightOnlyConfig()
    if device.type == "cuda":
        return Int4WeightOnlyConfig(
            group_size=form.group_size, int4_packing_format="tile_packed_to_4d"
        )
    bits: Any = torch.int4  # type: ignore[attr-defined]
    return IntxWeightOnlyConfig(weight_dtype=bits, granularity=PerGroup(form.group_size))


def sharded(
    model: PreTrainedModel, group: Collective, kind: str = Quantization.NONE
) -> PreTrainedModel:
    """Returns this rank's share of a whole model with plain weights, quantised as ``kind``;
    ``model`` is unchanged.
    """
    shard = shared_copy(model)
    full = dict(shard.named_parameters(remove_duplicate=False))
    cuts, formats = share_plan(shard, group, kind)
    for name in cuts | formats:
        path, _, leaf = name.rpartition(".")
        whole = full[name]
        share = share_of(whole, cuts.get(name), formats.get(name), whole.dtype, whole.device)
        setattr(shard.get_submodule(path), leaf, share)
    return shard


def share_plan(
    model: PreTrainedModel, group: Collective | None, kind: str
) -> tuple[dict[str, Cut], dict[str, WeightFormat]]:
    """Replaces a model's linear layers in place by shares, see ``shard_modules``; returns the cuts
    of parameters (none without a group) and the formats of quantised ones.
    """
    formats = weight_formats(model, kind)
    if group is None:
        return {}, formats
    from specdec.tensor_parallel.sharding import (
        shard_modules,  # only ranks of a group need the package
    )

    return shard_modules(model, group, partial(scale_inputs, kind=kind)), formats


def share_of(
    full: Any,
    cut: Cut | None,
    form: WeightFormat | None,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Parameter:
    """Returns a share of a parameter, without gradients; one that is not quantised may be a view of
    ``full``.

    ``full`` is the whole tensor (with ``cut`` None) or a slice of a safetensors file, of which only
    the share is read, and for int8 with cut inputs also every row's bounds, in blocks of rows.
    """
    tensor = (full if cut is None else cut.of(full, dtype)).to(device, dtype)
    if form is None:
        return nn.Parameter(tensor, requires_grad=False)
    shares_scales = cut is not None and cut.dim == 1 and not form.group_size  # with other ranks
    bounds = _row_bounds(full).to(device, dtype) if shares_scales else None
    return quantized(tensor, form, bounds)


def _row_bounds(full: Any) -> Tensor:
    """Returns the least and largest value of every row, [O, 2]; rounding keeps their order."""
    shape = full.get_shape() if hasattr(full, "get_shape") else full.shape
    blocks = (full[start : start + _BLOCK] for start in range(0, shape[0], _BLOCK))
    return torch.cat([torch.stack([rows.amin(1), rows.amax(1)], 1) for rows in blocks])
