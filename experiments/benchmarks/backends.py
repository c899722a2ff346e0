"""Times of a target's passes per backend: ``python -m experiments.benchmarks.backends``.

Rows of a random tree over contexts of several lengths, all backends in turn in one process, medians
of wall time and of this thread's CPU time in milliseconds. With one thread, CPU time tells what a
pass costs on a machine that is busy with other work.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import numpy as np
import torch

from specdec.attention.tree_attention import TreeCache
from specdec.clocks.meter import Meter
from specdec.models.execution import Execution
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.pairs import PretrainedPair
from specdec.types import TreeRows

BACKENDS = ("eager", "onnx")
CHUNK = 64  # tokens per pass of the prompt


def main() -> int:
    """Prints a table, and writes it as JSON where ``--output`` names a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="bundled:target", help="model folder")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pair = PretrainedPair(target=args.target)
    runners = {
        backend: ModelRunner(
            model=pair.target, name="target", meter=Meter(), execution=Execution(backend=backend)
        )
        for backend in BACKENDS
    }
    figures = []
    print(f"{'context':>8}{'rows':>6}" + "".join(f"{b + ' ms (CPU)':>20}" for b in BACKENDS))
    for context in args.contexts:
        caches = {backend: _filled(runner, context) for backend, runner in runners.items()}
        for rows in args.rows:
            times: dict[str, list[tuple[float, float]]] = {backend: [] for backend in BACKENDS}
            for _, backend in product(range(args.repeats), BACKENDS):
                times[backend].append(_pass(runners[backend], caches[backend], context, rows))
            shown = f"{context:8d}{rows:6d}"
            for backend in BACKENDS:
                wall, cpu = (1e3 * median(values) for values in zip(*times[backend], strict=True))
                shown += f"{wall:12.2f} ({cpu:5.2f})"
                entry = {"backend": backend, "context": context, "rows": rows}
                figures.append({**entry, "wall_ms": round(wall, 3), "cpu_ms": round(cpu, 3)})
            print(shown)
    if args.output:
        about = {"target": args.target, "threads": args.threads, "repeats": args.repeats}
        args.output.write_text(json.dumps({**about, "passes": figures}, indent=1) + "\n")
    return 0


def _filled(runner: ModelRunner, context: int) -> TreeCache:
    """A cache with ``context`` tokens."""
    cache = runner.new_cache(2 * context + 128)
    for start in range(0, context, CHUNK):
        tokens = np.arange(start, min(start + CHUNK, context)) % runner.vocab_size
        runner.forward([cache.rows(prefix_tokens=tokens)], logits_rows=NO_ROWS)
    return cache


def _pass(runner: ModelRunner, cache: TreeCache, context: int, num: int) -> tuple[float, float]:
    """Seconds of wall and CPU time of one pass over a binary tree, which is then dropped."""
    nodes = np.arange(num)
    parents = (nodes - 1) // 2
    wall, cpu = perf_counter(), thread_time()
    tree = TreeRows.within(prefix_len=context, node_ids=nodes, tokens=nodes, parent_ids=parents)
    runner.forward([cache.rows(tree=tree)])
    seconds = perf_counter() - wall, thread_time() - cpu
    cache.truncate(context)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
