"""Compiles every kernel for a GPU without one: set TRITON_INTERPRET=0 and run this module.

Triton's interpreter accepts code that its compiler rejects, such as variables that change type.
Strides and pointers are declared as multiples of 16, as for the shapes of real models.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.attention import triton_kernel as tree_attention
from specdec.kernels import swiglu

_TYPES = {
    "visible": "*u8",
    "lengths": "*i32",
    "sums": "*fp32",
    "tops": "*fp32",
    "counters": "*i32",
    "scale": "fp32",
}
_HALF = ("query", "key", "value", "output", "hidden", "gate", "up")
_ODD = ("num_rows", "num_out", "visible_row", "scale")

_LEAST_SHARED = 99 * 1024  # bytes of a block on the smallest devices since capability 8.0


def compile_kernel(kernel: Any, dtype: str = "bf16", **constants: int) -> str:
    """Compiles a kernel for compute capability 9.0; returns its PTX."""
    names = kernel.arg_names
    types = dict.fromkeys(_HALF, f"*{dtype}") | _TYPES
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    even = [["tt.divisibility", 16]]
    hints = {
        (i,): even for i, name in enumerate(names) if name not in constants and name not in _ODD
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert len(done.asm["cubin"]) > 0
    assert done.metadata.shared <= _LEAST_SHARED, f"{done.metadata.shared} bytes are too many"
    return str(done.asm["ptx"])


def main() -> None:
    """Compiles all kernels with the parameters of the 1B and 8B shapes."""
    blocks = {"BLOCK_ROWS": 16, "BLOCK_OUT": 32, "BLOCK_IN": 64}
    attention = {"HEADS": 32, "PER_GROUP": 4, "BLOCK_KEYS": 64, "BLOCK_ROWS": 32}
    wide = attention | {"BLOCK_KEYS": 32}
    found = {
        "tree attention, split": compile_kernel(
            tree_attention._tree_attention, **attention, DIM=128, BLOCK_DIM=128, SPLITS=16
        ),
        "tree attention, whole": compile_kernel(
            tree_attention._tree_attention, **attention, DIM=64, BLOCK_DIM=64, SPLITS=1
        ),
        "swiglu": compile_kernel(swiglu._gated, **blocks),
        "tree attention, heads of 256": compile_kernel(
            tree_attention._tree_attention, **wide, DIM=256, BLOCK_DIM=256, SPLITS=16
        ),
        "swiglu, float16": compile_kernel(swiglu._gated, "fp16", **blocks),
    }
    for dim in (64, 128, 256):  # float32 has no tensor cores here, and the largest blocks
        rows, keys, wide_dim = tree_attention._block(64 * 4, dim, 4)
        sizes = {"BLOCK_ROWS": rows, "BLOCK_KEYS": keys, "DIM": dim, "BLOCK_DIM": wide_dim}
        compile_kernel(
            tree_attention._tree_attention, "fp32", **attention | sizes, SPLITS=8, num_rows=1
        )
        print(f"tree attention, float32, heads of {dim}: compiled")
    for name, ptx in found.items():
        assert "mma" in ptx, f"{name} does not use tensor cores"
        print(f"{name}: compiled, {ptx.count('cp.async')} asynchronous copies")


if __name__ == "__main__":
    main()
