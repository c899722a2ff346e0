"""Medians of operations after warm-up: inside a captured graph on a GPU, called one by one without.

Both sides of every comparison go through ``timed``, so both are captured or neither is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how often things are timed.

    Attributes:
        device: "cuda" or "cpu".
        dtype: of weights and activations.
        repeats: timings, of which the median counts.
        copy_mib: size of the tensor that the copy bandwidth is measured with.
        cold_mib: an operation is timed over so many bytes of different operands, so that the
            second-level cache holds none of them from one use to the next.
        deadline: perf_counter value after which nothing new is begun.
        attention, graphs, kernels: how models are run.
    """

    device: str
    dtype: torch.dtype
    repeats: int
    copy_mib: int
    cold_mib: int
    deadline: float
    attention: str
    graphs: str
    kernels: str

    @property
    def captured(self) -> bool:
        """Whether operations are timed inside CUDA graphs."""
        return self.device == "cuda"

    def late(self) -> bool:
        """Whether the time that the script may take has gone."""
        return perf_counter() > self.deadline

    def copies(self, num_bytes: int) -> int:
        """How many sets of operands of ``num_bytes`` make ``cold_mib``; at most 64."""
        return max(1, min(64, (self.cold_mib << 20) // max(1, num_bytes)))


def timed(bench: Bench, run: Callable[[], object], *, calls: int = 1) -> float:
    """Microseconds of one of ``calls`` operations that ``run`` launches."""
    return (_captured(bench, run) if bench.captured else _called(bench, run)) / calls


def copy_bandwidth(bench: Bench) -> float:
    """Bytes per second, read and written, of a copy of one large tensor to another."""
    source = torch.zeros(bench.copy_mib << 20, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (timed(bench, lambda: target.copy_(source)) * 1e-6)


def _called(bench: Bench, run: Callable[[], object]) -> float:
    for _ in range(_WARM_UP):
        run()
    found = []
    for _ in range(bench.repeats):
        start = perf_counter()
        run()
        found.append(perf_counter() - start)
    return median(found) * 1e6


def _captured(bench: Bench, run: Callable[[], object]) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(_WARM_UP):
        graph.replay()
    found = []
    for _ in range(bench.repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return median(found)
