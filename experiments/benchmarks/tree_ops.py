"""Times of the token tree's operations: ``python -m experiments.benchmarks.tree_ops``.

Two beams with 16 candidates per node: 21 full levels of width 64 (1361 nodes: 21 stages)
and 4 of width 8 (about a best-first pass). Prints medians over fresh copies of the tree and the
limits for the large one; the exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from specdec.policies.tree_growth import append_best, bottom_level, most_probable
from specdec.tree import TokenTree
from specdec.types import Candidates, IntArray

NUM_CANDIDATES = 16
LIMITS_MS = {"append": 0.3, "reroot": 5.0, "most_probable": 1.0}
"""Limits on the large tree, one core: appending a level, rerooting, the 64 best nodes."""

Operation = Callable[[TokenTree], object]


def random_candidates(rng: np.random.Generator, num_nodes: int) -> Candidates:
    """Candidates with decreasing random log-probabilities, as of a draft model."""
    shape = (num_nodes, NUM_CANDIDATES)
    return Candidates(
        tokens=rng.integers(0, 4096, shape),
        logprobs=-np.cumsum(rng.exponential(size=shape), axis=1),
        counts=np.full(num_nodes, NUM_CANDIDATES),
    )


def grown_tree(*, levels: int, width: int, seed: int = 0) -> TokenTree:
    """A beam of ``levels`` full levels, below a root and its children; the last one is expanded."""
    rng = np.random.default_rng(seed)
    tree = TokenTree(token=0, position=100)
    bottom: IntArray = np.zeros(1, np.int64)
    while True:
        tree.set_candidates(bottom, random_candidates(rng, len(bottom)), slice(0, len(bottom)))
        if len(tree) > levels * width:
            return tree
        bottom = append_best(tree, bottom, width, NUM_CANDIDATES)


def operations(tree: TokenTree, num: int) -> dict[str, Operation]:
    """The timed operations by name; ``num`` is the level width and the size of selections."""
    bottom = bottom_level(tree)
    candidates = random_candidates(np.random.default_rng(1), len(bottom))
    rows = slice(0, len(bottom))
    tokens, logprobs = np.arange(num), np.full(num, -1.0)
    parents = np.resize(bottom, num)
    sizes = [int(tree.subtree(int(slot)).sum()) for slot in tree.children(0)]
    child = int(tree.children(0)[int(np.argmax(sizes))])
    ids = tree.ids[bottom]
    return {
        "append": lambda t: t.append(parents, tokens, logprobs),
        "set_candidates": lambda t: t.set_candidates(bottom, candidates, rows),
        "take": lambda t: t.take(parents[: len(bottom)], np.zeros(len(bottom), np.int64)),
        "append_best": lambda t: append_best(t, bottom, num, NUM_CANDIDATES),
        "best_candidates": lambda t: t.best_candidates(num),
        "most_probable": lambda t: most_probable(t, t.scores, t.scores, num),
        "paths": lambda t: t.paths(bottom),
        "slots": lambda t: t.slots(ids),
        "child": lambda t: t.child(0, 7),
        "path": lambda t: t.path(len(t) - 1),
        "reroot": lambda t: t.reroot(child),
        "reset": lambda t: t.reset(token=1, position=101),
    }


def median_ms(operation: Operation, tree: TokenTree, repeats: int) -> float:
    """Median milliseconds of ``operation`` on ``repeats`` fresh copies of ``tree``."""
    times = []
    for _ in range(repeats):
        fresh = copy.deepcopy(tree)
        fresh.subtree(len(fresh) - 1)  # brings the copy into the CPU cache
        start = perf_counter()
        operation(fresh)
        times.append(perf_counter() - start)
    return median(times) * 1e3


def main() -> int:
    """Prints the table; 1 if the large tree exceeds a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200, help="copies per operation")
    repeats = parser.parse_args().repeats
    large, small = grown_tree(levels=21, width=64), grown_tree(levels=4, width=8)
    small_operations = operations(small, 8)
    print(f"{'operation':18}{len(large):>7} nodes{len(small):>8} nodes   limit  (ms, medians)")
    slow = False
    for name, operation in operations(large, 64).items():
        large_ms = median_ms(operation, large, repeats)
        small_ms = median_ms(small_operations[name], small, repeats)
        limit = LIMITS_MS.get(name)
        exceeded = limit is not None and large_ms > limit
        slow |= exceeded
        note = "" if limit is None else f"{limit:8.1f}{'  EXCEEDED' if exceeded else ''}"
        print(f"{name:18}{large_ms:13.4f}{small_ms:14.4f}{note}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
