"""Fused SwiGLU, optionally with the preceding norm, and norm + projections; one launch each.

As in SwiftSpec 3.3, each thread block computes the same tile of both products, so that the input is
read once and the gate stays on the chip. The norm scales a row by a scalar, so it is applied after
the product, and its sum of squares is computed from the tiles that the product reads. In float16,
unnormalised values could overflow, so there an extra pass over the rows computes the scalar first.

Shape letters: R rows, E hidden size, F or N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MIN_DOT = 16
_MAX_BLOCK_ROWS = 64
_BLOCK_OUT = 32
_BLOCK_IN = 64
_MAX_MATRICES = 3


# fmt: off
@triton.jit
def _scale(  # type: ignore[no-untyped-def]
    hidden, rows, in_rows, num_in, hidden_row, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
):
    # fmt: on
    """float32[BLOCK_ROWS]: the norm's scale of each row."""
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for begin in range(0, num_in, BLOCK_IN):
        columns = begin + tl.arange(0, BLOCK_IN)
        loaded = in_rows[:, None] & (columns < num_in)[None, :]
        at_hidden = hidden + rows[:, None] * hidden_row + columns[None, :]
        x = tl.load(at_hidden, mask=loaded, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
    return tl.rsqrt(squares / num_in + eps)


# fmt: off
@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    hidden, norm, gate, up, output, num_rows, num_out, num_in, hidden_row, eps,
    NORM: tl.constexpr, EARLY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    # fmt: on
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    in_rows, in_outs = rows < num_rows, outs < num_out
    gated = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    linear = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    early = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    if EARLY:
        early = _scale(hidden, rows, in_rows, num_in, hidden_row, eps, BLOCK_ROWS, BLOCK_IN)
    for begin in range(0, num_in, BLOCK_IN):
        columns = begin + tl.arange(0, BLOCK_IN)
        in_columns = columns < num_in
        at_hidden = hidden + rows[:, None] * hidden_row + columns[None, :]
        x = tl.load(at_hidden, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
        if NORM:
            exact = x.to(tl.float32) * early[:, None]
            squares += tl.sum(exact * exact, 1)
            factor = tl.load(norm + columns, mask=in_columns, other=0.0).to(tl.float32)
            x = (exact * factor[None, :]).to(x.dtype)
        offsets = outs[:, None].to(tl.int64) * num_in + columns[None, :]
        loaded = in_outs[:, None] & in_columns[None, :]
        w = tl.load(gate + offsets, mask=loaded, other=0.0)
        gated += tl.dot(x, tl.trans(w), input_precision="ieee")
        w = tl.load(up + offsets, mask=loaded, other=0.0)
        linear += tl.dot(x, tl.trans(w), input_precision="ieee")
    if NORM and not EARLY:
        scale = tl.rsqrt(squares / num_in + eps)
        gated *= scale[:, None]
        linear *= scale[:, None]
    result = gated * tl.sigmoid(gated) * linear
    at_output = output + rows[:, None] * num_out + outs[None, :]
    tl.store(
        at_output, result.to(output.dtype.element_ty), mask=in_rows[:, None] & in_outs[None, :]
    )


# fmt: off
@triton.jit
def _normed(  # type: ignore[no-untyped-def]
    hidden, norm, first, second, third, output, num_rows, num_in, hidden_row, eps, out_1, out_2,
    out_3, blocks_1, blocks_2, EARLY: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):
    # fmt: on
    # The matrix that this block's outputs belong to, and its offset among all outputs.
    block = tl.program_id(0)
    matrix, num_out, base = first, out_1, 0
    if block >= blocks_1 + blocks_2:
        matrix, num_out, base = third, out_3, out_1 + out_2
        block -= blocks_1 + blocks_2
    elif block >= blocks_1:
        matrix, num_out, base = second, out_2, out_1
        block -= blocks_1
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outs = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    in_rows, in_outs = rows < num_rows, outs < num_out
    result = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    early = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    if EARLY:
        early = _scale(hidden, rows, in_rows, num_in, hidden_row, eps, BLOCK_ROWS, BLOCK_IN)
    for begin in range(0, num_in, BLOCK_IN):
        columns = begin + tl.arange(0, BLOCK_IN)
        in_columns = columns < num_in
        at_hidden = hidden + rows[:, None] * hidden_row + columns[None, :]
        x = tl.load(at_hidden, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
        exact = x.to(tl.float32) * early[:, None]
        squares += tl.sum(exact * exact, 1)
        factor = tl.load(norm + columns, mask=in_columns, other=0.0).to(tl.float32)
        offsets = outs[:, None].to(tl.int64) * num_in + columns[None, :]
        w = tl.load(matrix + offsets, mask=in_outs[:, None] & in_columns[None, :], other=0.0)
        x = (exact * factor[None, :]).to(x.dtype)
        result += tl.dot(x, tl.trans(w), input_precision="ieee")
    if not EARLY:
        result *= tl.rsqrt(squares / num_in + eps)[:, None]
    at_output = output + rows[:, None] * (out_1 + out_2 + out_3) + base + outs[None, :]
    tl.store(
        at_output, result.to(output.dtype.element_ty), mask=in_rows[:, None] & in_outs[None, :]
    )


def swiglu(
    hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0
) -> Tensor:
    """silu(hidden gate^T) * (hidden up^T) in float32, float16 or bfloat16 (SwiftSpec 3.3).

    Args:
        hidden: [R, E], last dimension contiguous.
        gate, up: [F, E], contiguous.
        norm, eps: weight [E] and epsilon of a root-mean-square norm to apply first; None: no norm.

    Returns:
        [R, F].
    """
    (num_rows, num_in), num_out = hidden.shape, len(gate)
    output = torch.empty(num_rows, num_out, dtype=hidden.dtype, device=hidden.device)
    block_rows = _block_rows(num_rows)
    grid = (triton.cdiv(num_out, _BLOCK_OUT), triton.cdiv(num_rows, block_rows))
    _gated[grid](
        hidden,
        hidden if norm is None else norm,
        gate,
        up,
        output,
        num_rows,
        num_out,
        num_in,
        hidden.stride(0),
        eps,
        NORM=norm is not None,
        EARLY=norm is not None and hidden.dtype == torch.float16,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=_BLOCK_IN,
    )
    return output


def norm_projection(
    hidden: Tensor, weight: Tensor, matrices: list[Tensor], eps: float
) -> Tensor:
    """Root-mean-square norm, then one or more projections, concatenated.

    Args:
        hidden: [R, E], last dimension contiguous.
        weight, eps: weight [E] and epsilon of the norm.
        matrices: [N_i, E] each, contiguous.

    Returns:
        [R, sum N_i].

    Raises:
        ValueError: unless there are one to three matrices.
    """
    if not 1 <= len(matrices) <= _MAX_MATRICES:
        raise ValueError(f"{len(matrices)} matrices; one launch supports 1 to {_MAX_MATRICES}")
    num_rows, num_in = hidden.shape
    sizes = [len(matrix) for matrix in matrices] + [0] * (_MAX_MATRICES - len(matrices))
    padded = [*matrices, *[matrices[0]] * (_MAX_MATRICES - len(matrices))]
    blocks = [triton.cdiv(size, _BLOCK_OUT) for size in sizes]
    output = torch.empty(num_rows, sum(sizes), dtype=hidden.dtype, device=hidden.device)
    block_rows = _block_rows(num_rows)
    _normed[(sum(blocks), triton.cdiv(num_rows, block_rows))](
        hidden,
        weight,
        *padded,
        output,
        num_rows,
        num_in,
        hidden.stride(0),
        eps,
        *sizes,
        *blocks[:2],
        EARLY=hidden.dtype == torch.float16,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=_BLOCK_IN,
    )
    return output


def _block_rows(num_rows: int) -> int:
    return min(_MAX_BLOCK_ROWS, max(_MIN_DOT, triton.next_power_of_2(num_rows)))
