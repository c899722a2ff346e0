"""Each kernel against its alternatives, captured alike, on operands outside the GPU's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from experiments.gpu.shapes import Shape
from experiments.gpu.timing import Bench, timed
from specdec.attention import support
from specdec.attention.backends import attention_kernel
from specdec.attention.tree_attention import Visibility, capped_attention

Call = Callable[[int], Any]


def attention_rows(bench: Bench, shape: Shape, *, context: int, nodes: int) -> list[dict[str, Any]]:
    """Tree attention of ``nodes`` rows over ``context`` tokens and themselves."""
    options = _options(bench)
    slots = context + nodes
    pair_bytes = 2 * shape.kv_heads * slots * shape.head_dim * bench.dtype.itemsize
    copies = bench.copies(pair_bytes)
    query = torch.randn(1, shape.heads, nodes, shape.head_dim, **options)
    stored = torch.randn(copies, 2, 1, shape.kv_heads, slots, shape.head_dim, **options)
    visible = torch.ones(nodes, nodes, dtype=torch.uint8, device=bench.device).tril()
    seen = Visibility(
        lengths=torch.tensor([context, slots], device=bench.device),
        visible=visible,
        num_slots=slots,
        dtype=bench.dtype,
    )
    mask = seen.mask()
    groups = shape.kv_heads

    def dense(i: int) -> torch.Tensor:
        key, value = stored[i]
        return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    folded_mask = mask.repeat(shape.heads // groups, 1)

    def folded(i: int) -> torch.Tensor:
        # All query heads of a key/value head as rows of one head: no copies of keys and values.
        key, value = stored[i]
        rows = query[0].unflatten(0, (groups, -1)).flatten(1, 2)[None]
        return scaled_dot_product_attention(rows, key, value, folded_mask)

    def unfused(i: int) -> torch.Tensor:
        key, value = stored[i]
        return capped_attention(query, key, value, mask, None, None)

    def kernel(kind: str) -> Callable[[], Call]:
        def make() -> Call:
            attend = attention_kernel(kind, torch.device(bench.device), bench.dtype)
            return lambda i: attend(query, stored[i, 0], stored[i, 1], seen, None)

        return make

    sides = {
        "triton (ours)": kernel("triton"),
        "sdpa, dense mask": lambda: dense,
        "sdpa, dense mask, heads folded": lambda: folded,
        "flash-attn prefix + tree": kernel("flash"),
        "torch, unfused": lambda: unfused,
    }
    about = {"kernel": "tree attention", "shape": shape.name, "context": context, "nodes": nodes}
    return _compared(bench, about, sides, copies, pair_bytes)


def swiglu_rows(bench: Bench, shape: Shape, *, nodes: int) -> list[dict[str, Any]]:
    """Gate and up projections, SiLU and product."""
    weight_bytes = 2 * shape.hidden * shape.inner * bench.dtype.itemsize
    copies = bench.copies(weight_bytes)
    options = _options(bench)
    hidden = torch.randn(nodes, shape.hidden, **options)
    weights = torch.randn(copies, 2 * shape.inner, shape.hidden, **options) * shape.hidden**-0.5

    def halves(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return weights[i, : shape.inner], weights[i, shape.inner :]

    def merged(i: int) -> torch.Tensor:
        gate, up = (hidden @ weights[i].T).chunk(2, -1)
        return silu(gate) * up

    def separate(hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return silu(hidden @ gate.T) * (hidden @ up.T)

    def ours() -> Call:
        problem = support.triton_problem(bench.device, bench.dtype)
        support.require(problem, "the Triton kernel")
        from specdec.kernels.swiglu import swiglu

        return lambda i: swiglu(hidden, *halves(i))

    def compiled() -> Call:
        run = torch.compile(separate, dynamic=False)
        return lambda i: run(hidden, *halves(i))

    sides = {
        "triton (ours)": ours,
        "torch, one product": lambda: merged,
        "torch, two products": lambda: lambda i: separate(hidden, *halves(i)),
        **({"torch.compile": compiled} if bench.captured else {}),
    }
    about = {"kernel": "swiglu", "shape": shape.name, "context": None, "nodes": nodes}
    return _compared(bench, about, sides, copies, weight_bytes)


def _options(bench: Bench) -> dict[str, Any]:
    """Of random operands."""
    generator = torch.Generator(bench.device).manual_seed(0)
    return {"generator": generator, "device": bench.device, "dtype": bench.dtype}


def _compared(
    bench: Bench,
    about: dict[str, Any],
    sides: dict[str, Callable[[], Call]],
    copies: int,
    num_bytes: int,
) -> list[dict[str, Any]]:
    """A row per alternative: time, difference from the first, or the reason if it cannot run."""
    rows: list[dict[str, Any]] = []
    expected = None
    for name, make in sides.items():
        row = {**about, "side": name, "us": None, "bytes": num_bytes, "skipped": None}
        rows.append(row)
        try:
            call = make()
            with torch.inference_mode():
                output = call(0).flatten().double()
                expected = output if expected is None else expected
                row["difference"] = (output - expected).abs().max().item()
                us = timed(bench, lambda call=call: [call(i) for i in range(copies)], calls=copies)
                row["us"] = us
        except Exception as error:  # compilers and extensions raise any type
            row["skipped"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    ours = rows[0]["us"]
    for row in rows:
        row["over_ours"] = row["us"] / ours if ours and row["us"] else None
    return rows
