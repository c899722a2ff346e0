"""Random trees behind random prompts, for tests of runners and caches."""

from __future__ import annotations

import numpy as np

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.models.runner import NO_ROWS, ModelRunner


def grown(
    runner: ModelRunner, cache: TreeCache, *, prefix: int = 9, nodes: int = 7, seed: int = 0
) -> Rows:
    """Prefills a prompt; returns the rows of a random tree behind it, not yet run."""
    rng = np.random.default_rng(seed)
    runner.forward([cache.rows(prefix_tokens=rng.integers(3, 61, prefix))], logits_rows=NO_ROWS)
    parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)])
    depths = np.zeros(nodes, np.int64)
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
    return cache.rows(
        node_ids=np.arange(nodes),
        node_tokens=rng.integers(3, 61, nodes),
        parent_ids=parents,
        node_positions=prefix + depths,
    )
