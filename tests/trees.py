"""Random trees behind random prompts, for tests of runners and caches."""

import numpy as np

from specdec.attention.tree_attention import Rows, TreeCache
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.types import TreeRows


def grown(
    runner: ModelRunner, cache: TreeCache, *, prefix: int = 9, nodes: int = 7, seed: int = 0
) -> Rows:
    """Prefills a prompt; returns the rows of a random tree behind it, not yet run."""
    rng = np.random.default_rng(seed)
    runner.forward([cache.rows(prefix_tokens=rng.integers(3, 61, prefix))], logits_rows=NO_ROWS)
    return cache.rows(tree=random_tree(rng, prefix, nodes))


def random_tree(rng: np.random.Generator, prefix: int, nodes: int) -> TreeRows:
    """A root and nodes of which each is below a random earlier one, behind a prefix."""
    parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)])
    return TreeRows.within(
        prefix_len=prefix,
        node_ids=np.arange(nodes),
        tokens=rng.integers(3, 61, nodes),
        parent_ids=parents,
    )
