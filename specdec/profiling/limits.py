"""How close passes come to this machine's limits: the roofline model (Williams et al. 2009).

A pass of R rows takes at least the longer of two times: that of moving its bytes at the machine's
copy bandwidth, and that of its floating-point operations at the machine's GEMM rate.

Shape letters: R rows of a pass, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from specdec.clocks import Work
from specdec.executors.stage import split_layers
from specdec.models.config_values import config_value
from specdec.models.onnx.support import head_size
from specdec.models.quantize import num_bytes as stored_bytes
from specdec.models.slicing import layers_name
from specdec.pairs import HuggingFacePair
from specdec.profiling.passes import Sample
from specdec.report.plots import figure_of, png, tidy

_GEMM_SIZE = 1024
_LEAST_COPY = 1 << 22  # bytes: a smaller copy would mostly measure the call
_REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Measured limits of one device with the threads of the run.

    Attributes:
        copy_bytes: size of the copied tensor. It equals the weights of a pass, so that the copy and
            the pass benefit alike from a cache.
        bytes_per_s: read plus written bytes per second of a copy.
        flops_per_s: floating-point operations per second of a product of square matrices.
    """

    copy_bytes: int
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """What a pass must move and compute, and its measured median time.

    Attributes:
        kind: kind of work, as in a latency profile.
        num_bytes: weights, keys and values read once, and keys and values written for the rows.
            Activations are ignored.
        flops: two per weight and row, plus those of attention over context and rows.
    """

    kind: str
    rows: int
    num_bytes: int
    flops: int
    ms: float

    def bound_ms(self, machine: MachineLimits) -> float:
        moving, computing = self.times_ms(machine)
        return max(moving, computing)

    def times_ms(self, machine: MachineLimits) -> tuple[float, float]:
        """Returns the milliseconds to move the bytes, and those to compute the operations."""
        return (
            1e3 * self.num_bytes / machine.bytes_per_s,
            1e3 * self.flops / machine.flops_per_s,
        )

    def share(self, machine: MachineLimits) -> float | None:
        """Returns the least time over the measured time; None if no time was measured."""
        return self.bound_ms(machine) / self.ms if self.ms else None

    def to_json(self, machine: MachineLimits) -> dict[str, Any]:
        moving, computing = self.times_ms(machine)
        return {
            **asdict(self),
            "bound_ms": self.bound_ms(machine),
            "bound": "bytes" if moving >= computing else "flops",
            "share": self.share(machine),
        }


def measure_machine(*, num_bytes: int, dtype: torch.dtype, device: torch.device) -> MachineLimits:
    """Times a copy of ``num_bytes`` (at least 4 MiB) and a product of 1024 x 1024 matrices."""
    size = max(num_bytes, _LEAST_COPY) // dtype.itemsize
    source = torch.ones(size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    matrix = torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    copy_s = _seconds(lambda: target.copy_(source), device)
    gemm_s = _seconds(lambda: torch.mm(matrix, matrix, out=product), device)
    return MachineLimits(
        copy_bytes=size * dtype.itemsize,
        bytes_per_s=2 * size * dtype.itemsize / copy_s,
        flops_per_s=2 * _GEMM_SIZE**3 / gemm_s,
    )


def _seconds(work: Any, device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return median(times[1:])


def work_of(
    layers: Sequence[nn.Module], head: nn.Module | None, config: Any, *, rows: int, context: int
) -> tuple[int, int]:
    """Returns (bytes, FLOPs) of a pass.

    Args:
        layers: decoder layers that run; empty for the output head alone.
        head: output head; None for a pass without logits.
        config: the model's text configuration.
        context: number of cached tokens before the rows.
    """
    modules = [*layers] if head is None else [*layers, head]
    weights = [parameter for module in modules for parameter in module.parameters()]
    num_bytes = sum(map(stored_bytes, modules))
    flops = 2 * rows * sum(weight.numel() for weight in weights)
    if layers:
        heads = config.num_attention_heads
        size = head_size(config)
        per_token = len(layers) * kv_bytes(config, weights[0].element_size())
        num_bytes += per_token * (context + 2 * rows)  # the rows' own are written and read
        # Scores and weighted sums: two products over every entry.
        flops += 4 * len(layers) * heads * size * rows * (context + rows)
    return num_bytes, flops


def kv_bytes(config: Any, itemsize: int) -> int:
    """Returns the bytes of one token's keys and values in one layer."""
    groups = config_value(config, "num_key_value_heads", config.num_attention_heads)
    return 2 * int(groups) * head_size(config) * itemsize


def passes_of(
    pair: HuggingFacePair,
    samples: Mapping[Work, Sequence[Sample]],
    *,
    stages: int,
    context: int,
) -> list[PassCost]:
    """Returns the measured passes of stage, head and draft, with what each must move and compute.

    ``samples`` are results of ``measure_model``, which measures the longest of ``stages`` slices.
    ``context`` is the number of committed tokens before the rows.
    """
    bounds = split_layers(pair.num_layers, stages)
    num_layers = max(last - first for first, last in bounds)
    target, draft = pair.target, pair.draft
    measured: dict[Work, tuple[Any, Sequence[nn.Module], bool]] = {
        Work.STAGE: (target, _layers(target)[:num_layers], False),
        Work.HEAD: (target, (), True),
        Work.DRAFT: (draft, _layers(draft), True),
    }
    found = []
    for kind, (model, layers, has_head) in measured.items():
        head = model.get_output_embeddings() if has_head else None
        config = model.config.get_text_config()
        for sample in samples[kind]:
            num_bytes, flops = work_of(layers, head, config, rows=sample.tokens, context=context)
            found.append(
                PassCost(
                    kind=kind.value,
                    rows=sample.tokens,
                    num_bytes=num_bytes,
                    flops=flops,
                    ms=sample.median_ms,
                )
            )
    return found


def _layers(model: Any) -> list[nn.Module]:
    return list(model.get_submodule(layers_name(model)))


def roofline_png(machine: MachineLimits, passes: Sequence[PassCost]) -> bytes:
    """Plots reached FLOP/s over FLOPs per byte, with the machine's limits, on logarithmic axes."""
    figure = figure_of(6.5, 4.0)
    axes = figure.subplots()
    intensities = [work.flops / work.num_bytes for work in passes]
    low, high = min(intensities) / 2, max([*intensities, 100.0]) * 2
    ridge = machine.flops_per_s / machine.bytes_per_s
    line = sorted({low, min(max(ridge, low), high), high})
    limit = [min(machine.flops_per_s, x * machine.bytes_per_s) / 1e9 for x in line]
    axes.plot(line, limit, color="black", label="limit of this machine")
    for kind in dict.fromkeys(work.kind for work in passes):
        mine = [work for work in passes if work.kind == kind and work.ms]
        axes.plot(
            [work.flops / work.num_bytes for work in mine],
            [work.flops / work.ms / 1e6 for work in mine],
            "o-",
            label=f"{kind}, {mine[0].rows} to {mine[-1].rows} rows" if mine else kind,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
    tidy(axes, xlabel="FLOPs per byte of a pass", ylabel="GFLOP/s")
    return png(figure, "Passes under the limits of this machine (measured)")
