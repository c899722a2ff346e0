"""Median times of operations after warm-up: in a captured graph on a GPU, else call by call.

All sides of a comparison use ``timed``, so all are captured or none is.
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
    """Settings of the measurements.

    Attributes:
        repeats: number of timings, of which the median is taken.
        copy_mib: size of the tensor of the bandwidth measurement.
        cold_mib: size of the different operands over which an operation is timed, so that none is
            still in the second-level cache.
        deadline: ``perf_counter`` value after which no measurement starts.
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
        return perf_counter() > self.deadline

    def copies(self, num_bytes: int) -> int:
        """Number of operand sets of ``num_bytes`` in ``cold_mib``, 1 to 64."""
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
    def once() -> float:
        start = perf_counter()
        run()
        return (perf_counter() - start) * 1e6

    return _median(bench, once)


def _median(bench: Bench, once: Callable[[], float]) -> float:
    """Of the microseconds of ``once``, after some that do not count."""
    return median([once() for _ in range(_WARM_UP + bench.repeats)][_WARM_UP:])


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

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    return _median(bench, once)
