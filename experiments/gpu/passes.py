"""Latency of a pass against the number of nodes, and its share of the copy bandwidth."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from experiments.gpu.shapes import Shape, random_llama
from experiments.gpu.timing import Bench
from specdec.clocks.meter import Meter
from specdec.models.execution import Execution
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.types import TreeRows

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_WARM_UP = 3
_CHUNK = 512


def pass_rows(
    bench: Bench, shape: Shape, *, context: int, bandwidth: float
) -> list[dict[str, Any]]:
    """One row per number of nodes: a tree pass, including the wait for its logits.

    The model has random weights; ``bandwidth`` is the measured one in bytes per second.
    """
    positions = context + 2 * NODE_COUNTS[-1]
    model = random_llama(shape, device=bench.device, dtype=bench.dtype, positions=positions)
    runner = ModelRunner(
        model=model,
        name="target",
        meter=Meter(),
        attention=bench.attention,
        execution=Execution(graphs=bench.graphs, kernels=bench.kernels),
    )
    cache = runner.new_cache(positions)
    tokens = np.arange(context) % shape.vocab
    for start in range(0, context, _CHUNK):
        rows = cache.rows(prefix_tokens=tokens[start : start + _CHUNK])
        runner.forward([rows], logits_rows=NO_ROWS)
    results = []
    for nodes in NODE_COUNTS:
        ms = _one(bench, runner, cache, context, nodes)
        itemsize = bench.dtype.itemsize
        read = shape.weight_bytes(itemsize) + shape.cache_bytes(context + nodes, itemsize)
        row = {"shape": shape.name, "context": context, "nodes": nodes, "ms": ms}
        row["over_one_node"] = ms / results[0]["ms"] if results else 1.0
        row |= {"bytes": read, "bandwidth_share": read / (ms * 1e-3) / bandwidth}
        results.append({**row, "attention": bench.attention, "graphs": bench.graphs})
    return results


def _one(bench: Bench, runner: ModelRunner, cache: Any, context: int, nodes: int) -> float:
    """Milliseconds of the whole call: filling buffers, the pass, waiting for its logits."""
    ids = np.arange(nodes)
    parents = np.maximum(ids // 2, 0) - (ids == 0)  # a binary tree
    tree = TreeRows.within(prefix_len=context, node_ids=ids, tokens=ids, parent_ids=parents)
    seconds = []
    for _ in range(_WARM_UP + bench.repeats):
        rows = cache.rows(tree=tree)
        with torch.inference_mode():
            start = perf_counter()
            runner.forward([rows])
            seconds.append(perf_counter() - start)
        cache.truncate(context)
    return median(seconds[_WARM_UP:]) * 1e3
