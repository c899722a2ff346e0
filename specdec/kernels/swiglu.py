"""Fused SwiGLU in one launch (SwiftSpec 3.3), for ``model.kernels=triton``.

Each thread block computes the same tile of the gate and up products, so that the input is read once
and the gate's output stays on the chip.

Shape letters: R rows, E hidden size, F inner size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from specdec.errors import UserError

MAX_ROWS = 64  # larger passes run through cuBLAS, which multiplies many rows in larger tiles
_MIN_DOT = 16  # smallest dimension of a product on tensor cores
_BLOCK_OUT = 32
_BLOCK_IN = 64


# fmt: off
@triton.jit(do_not_specialize=["num_rows"])
def _gated(  # type: ignore[no-untyped-def]
    hidden, gate, up, output, num_rows, num_out, num_in, hidden_row,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):
    # fmt: on
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    in_rows, in_outs = rows < num_rows, outs < num_out
    gated = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    linear = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for begin in range(0, num_in, BLOCK_IN):
        columns = begin + tl.arange(0, BLOCK_IN)
        in_columns = columns < num_in
        at_hidden = hidden + rows[:, None] * hidden_row + columns[None, :]
        x = tl.load(at_hidden, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
        offsets = outs[:, None].to(tl.int64) * num_in + columns[None, :]
        loaded = in_outs[:, None] & in_columns[None, :]
        w = tl.load(gate + offsets, mask=loaded, other=0.0)
        gated += tl.dot(x, tl.trans(w), input_precision="ieee")
        w = tl.load(up + offsets, mask=loaded, other=0.0)
        linear += tl.dot(x, tl.trans(w), input_precision="ieee")
    result = gated * tl.sigmoid(gated) * linear
    at_output = output + rows[:, None] * num_out + outs[None, :]
    tl.store(
        at_output, result.to(output.dtype.element_ty), mask=in_rows[:, None] & in_outs[None, :]
    )


def swiglu(hidden: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Computes silu(hidden gate^T) * (hidden up^T), [R, F], in float32, float16 or bfloat16, from
    ``hidden`` [R, E] and contiguous ``gate`` and ``up`` [F, E].
    """
    (num_rows, num_in), num_out = hidden.shape, len(gate)
    output = torch.empty(num_rows, num_out, dtype=hidden.dtype, device=hidden.device)
    block_rows = min(MAX_ROWS, max(_MIN_DOT, triton.next_power_of_2(num_rows)))
    _gated[(triton.cdiv(num_out, _BLOCK_OUT), triton.cdiv(num_rows, block_rows))](
        hidden,
        gate,
        up,
        output,
        num_rows,
        num_out,
        num_in,
        hidden.stride(0),
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=_BLOCK_IN,
    )
    return output


class _SwiGLU(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self._mlp = mlp

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.shape[:-1].numel() > MAX_ROWS:
            return self._mlp(hidden)  # type: ignore[no-any-return]
        gate, up = self._mlp.gate_proj.weight, self._mlp.up_proj.weight
        inner = swiglu(hidden.flatten(0, -2), gate, up)
        return self._mlp.down_proj(inner.unflatten(0, hidden.shape[:-1]))  # type: ignore[no-any-return]


def use_swiglu(model: nn.Module) -> int:
    """Replaces all gated MLPs of ``model`` by fused ones, in place; returns their number."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "gate_proj") and hasattr(child, "up_proj") and hasattr(child, "down_proj")
    ]
    reason = None if found else "it has no gated units"
    for _, _, mlp in found:
        reason = reason or _problem(mlp)
    if reason:
        raise UserError(
            f"model.kernels=triton cannot run this model: {reason}; use model.kernels=torch"
        )
    for parent, name, mlp in found:
        setattr(parent, name, _SwiGLU(mlp))
    return len(found)


def _problem(mlp: Any) -> str | None:
    if "silu" not in type(mlp.act_fn).__name__.lower():
        return f"its activation is {type(mlp.act_fn).__name__}, not SiLU"
    for linear in (mlp.gate_proj, mlp.up_proj):
        weight: Any = getattr(linear, "weight", None)
        plain = isinstance(linear, nn.Linear) and linear.bias is None and weight is not None
        if not plain or not weight.is_contiguous():
            return "its weights are biased or transposed"
    return None
