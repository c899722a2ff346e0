"""One rank's share of a model: each parameter is cut and then quantised.

The shares of a quantised matrix have the integers and scales of the whole matrix, so together they
are the model of plain decoding; only sums over the ranks are added in another order.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.quantize import (
    Quantization,
    WeightFormat,
    quantized,
    scale_inputs,
    weight_formats,
)
from specdec.models.slicing import shared_copy

if TYPE_CHECKING:
    from specdec.tensor_parallel import Collective
    from specdec.tensor_parallel.cuts import Cut

_BLOCK = 1024
"""Rows of a file's matrix that are read at once for their bounds."""


def sharded(
    model: PreTrainedModel, group: Collective, kind: str = Quantization.NONE
) -> PreTrainedModel:
    """Returns this rank's share of a whole model with plain weights; ``model`` is not changed.

    ``kind``, a value of ``Quantization``, says how to quantise the share.
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
    """Replaces a model's linear layers in place by shares, see ``shard_modules``.

    Returns the cuts of parameters, none if ``group`` is None, and the formats of quantised ones.
    """
    formats = weight_formats(model, kind)
    if group is None:
        return {}, formats
    from specdec.tensor_parallel import shard_modules  # only ranks of a group need the package

    return shard_modules(model, group, partial(scale_inputs, kind=kind)), formats


def share_of(
    full: Any,
    cut: Cut | None,
    form: WeightFormat | None,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Parameter:
    """Returns a share of a parameter, without gradients.

    Args:
        full: the whole tensor, or a slice of a safetensors file, of which only the share is read
            (and for int8 with cut inputs also every row's bounds, in blocks of rows).
        cut: the share; None: all of it, which must be a tensor.
        form: format of the whole matrix; None: not quantised. Such shares may be views of ``full``.
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
