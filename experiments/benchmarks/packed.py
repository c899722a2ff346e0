"""Time of linear layers with plain and with packed weights, on one thread of this CPU.

    python -m experiments.benchmarks.packed [--inputs 2048] [--outputs 8192] [--rows 1 4 8 32]

Each figure is the fastest of several turns over more weights than caches hold, in milliseconds per
layer, and in brackets the GB/s at which the weight is read. docs/backends.md explains
``model.kernels=packed``.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from specdec.kernels.packed import PackedLinear, packed_problem

_BYTES = 200e6  # of the weights that one turn reads
_TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 512])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        problem = packed_problem("cpu", dtype)
        if problem is not None:
            print(f"{dtype}: {problem}")
            continue
        compare(args.inputs, args.outputs, args.rows, dtype)


@torch.inference_mode()
def compare(inputs: int, outputs: int, rows: Sequence[int], dtype: torch.dtype) -> None:
    size = inputs * outputs * dtype.itemsize
    plain = [
        nn.Linear(inputs, outputs, bias=False, dtype=dtype) for _ in range(round(_BYTES / size) + 1)
    ]
    packed = [PackedLinear(linear) for linear in plain]
    print(f"{dtype}, {inputs} x {outputs}\n{'rows':>5s}{'plain':>20s}{'packed':>20s}")
    for count in rows:
        hidden = torch.randn(count, inputs, dtype=dtype)
        seconds = [fastest(layers, hidden) for layers in (plain, packed)]
        cells = [f"{1e3 * s:.2f} ms ({size / s / 1e9:.1f})" for s in seconds]
        print(f"{count:5d}{cells[0]:>20s}{cells[1]:>20s}")


def fastest(layers: Sequence[Callable[[Tensor], Tensor]], hidden: Tensor) -> float:
    turns = timeit.repeat(lambda: [layer(hidden) for layer in layers], number=1, repeat=_TURNS)
    return min(turns) / len(layers)


if __name__ == "__main__":
    main()
