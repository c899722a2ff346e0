"""How close passes come to this machine's limits: the roofline model (Williams et al. 2009).

A pass of R rows takes at least the longer of two times: that of moving its bytes at the machine's
copy bandwidth, and that of its floating-point operations at the machine's GEMM rate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.benchmark import Timer

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


def measure_machine(
    *, num_bytes: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Times a copy of ``num_bytes`` (at least 4 MiB; as large as a pass, it benefits as much from a
    cache), read plus written, and a product of 1024 x 1024 matrices.
    """
    source = torch.ones(max(num_bytes, _LEAST_COPY) // dtype.itemsize, dtype=dtype, device=device)
    matrix = torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype, device=device)
    tensors = {"source": source, "target": torch.empty_like(source), "mm": torch.mm}
    tensors |= {"matrix": matrix, "product": torch.empty_like(matrix)}

    def seconds(work: str) -> float:
        timer = Timer(work, globals=tensors, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=0.1).median)

    return {
        "copy_bytes": source.nbytes,
        "bytes_per_s": 2 * source.nbytes / seconds("target.copy_(source)"),
        "flops_per_s": 2 * _GEMM_SIZE**3 / seconds("mm(matrix, matrix, out=product)"),
    }


def work_of(
    layers: Sequence[nn.Module], head: nn.Module | None, config: Any, *, rows: int, context: int
) -> tuple[int, int]:
    """Returns (bytes, FLOPs) of a pass over decoder layers, an output head, or both, after
    ``context`` cached tokens.

    Bytes are weights, keys and values read once, and keys and values written for the rows, without
    activations; FLOPs are two per weight and row, plus those of attention.
    """
    modules = [*layers] if head is None else [*layers, head]
    weights = [parameter for module in modules for parameter in module.parameters()]
    num_bytes = sum(map(stored_bytes, modules))
    flops = 2 * rows * sum(weight.numel() for weight in weights)
    if layers:
        per_token = len(layers) * kv_bytes(config, weights[0].element_size())
        num_bytes += per_token * (context + 2 * rows)  # the rows' own are written and read
        # Scores and weighted sums: two products over every entry.
        width = config.num_attention_heads * head_size(config)
        flops += 4 * len(layers) * width * rows * (context + rows)
    return num_bytes, flops


def kv_bytes(config: Any, itemsize: int) -> int:
    groups = config_value(config, "num_key_value_heads", config.num_attention_heads)
    return 2 * int(groups) * head_size(config) * itemsize


def passes_of(
    pair: HuggingFacePair, samples: Mapping[Work, Sequence[Sample]], *, stages: int, context: int
) -> list[dict[str, Any]]:
    """Returns the passes of ``measure_model``'s samples, with what each must move and compute."""
    num_layers = max(last - first for first, last in split_layers(pair.num_layers, stages))
    target, draft = pair.target, pair.draft
    models = {
        Work.STAGE: (target, _layers(target)[:num_layers], None),
        Work.HEAD: (target, [], target.get_output_embeddings()),
        Work.DRAFT: (draft, _layers(draft), draft.get_output_embeddings()),
    }
    passes = []
    for kind, (model, layers, head) in models.items():
        config = model.config.get_text_config()
        for sample in samples[kind]:
            rows = sample.tokens
            size, flops = work_of(layers, head, config, rows=rows, context=context)
            work = {"kind": kind.value, "rows": rows, "num_bytes": size, "flops": flops}
            passes.append({**work, "ms": sample.median_ms})
    return passes


def _layers(model: Any) -> list[nn.Module]:
    return list(model.get_submodule(layers_name(model)))


def bounded(work: Mapping[str, Any], machine: Mapping[str, float]) -> dict[str, Any]:
    moving = 1e3 * work["num_bytes"] / machine["bytes_per_s"]
    computing = 1e3 * work["flops"] / machine["flops_per_s"]
    ms, bound = max((moving, "bytes"), (computing, "flops"), key=lambda limit: limit[0])
    share = ms / work["ms"] if work["ms"] else None
    return {**work, "bound_ms": ms, "bound": bound, "share": share}


def roofline_png(machine: Mapping[str, float], passes: Sequence[Mapping[str, Any]]) -> bytes:
    """Plots reached FLOP/s over FLOPs per byte, with the machine's limits, on logarithmic axes."""
    figure = figure_of(6.5, 4.0)
    axes = figure.subplots()
    frame = pd.DataFrame(passes)
    frame["intensity"] = frame.flops / frame.num_bytes
    low, high = frame.intensity.min() / 2, max(frame.intensity.max(), 100.0) * 2
    peak, bandwidth = machine["flops_per_s"], machine["bytes_per_s"]
    line = np.sort([low, np.clip(peak / bandwidth, low, high), high])
    limit = np.minimum(peak, line * bandwidth) / 1e9
    axes.loglog(line, limit, "k", label="limit of this machine")
    for kind, points in frame[frame.ms > 0].groupby("kind", sort=False):
        label = f"{kind}, {points.rows.min()} to {points.rows.max()} rows"
        axes.plot(points.intensity, points.flops / points.ms / 1e6, "o-", label=label)
    axes.legend(fontsize=8)
    tidy(axes, xlabel="FLOPs per byte of a pass", ylabel="GFLOP/s")
    return png(figure, "Passes under the limits of this machine (measured)")
