"""What ``TreeCache`` does at a commit; that it equals fresh forwards: test_random_forests.py."""

import numpy as np
import pytest
import torch

from specdec.models.random import random_model
from specdec.types import NO_NODE, TreeRows
from tests.shapes import runner_of
from tests.states import new_commit


@pytest.fixture(scope="module")
def runner():
    return runner_of(random_model("llama", dtype="float64", num_layers=2))


def test_holes_are_filled_from_the_end(runner):
    """Of ten siblings below the root, only those beyond the new end move."""
    cache = runner.new_cache(16)
    ids = np.arange(11)
    parents = np.array([NO_NODE] + [0] * 10)
    runner.forward([cache.rows(tree=tree_of(ids, parents, 0))])
    before = cache.storage.clone()
    cache.commit(new_commit(kept=[1, 3, 4, 9], prefix_len=1))
    assert cache.node_ids.tolist() == [1, 9, 3, 4]
    assert torch.equal(cache.storage[:, :, :, 1:5], before[:, :, :, [1, 9, 3, 4]])


def test_root_cached_as_prefix(runner):
    """A source may cache the root itself as a committed token; the commit then skips it."""
    cache = runner.new_cache(16)
    ids = np.arange(1, 3)
    runner.forward([cache.rows(prefix_tokens=np.array([4, 5]))])  # position 1 is the root
    runner.forward([cache.rows(tree=tree_of(ids, ids - 1, 2))])
    cache.commit(new_commit(kept=[1, 2], prefix_len=2))
    assert (cache.cached_len, cache.node_ids.tolist()) == (2, [1, 2])


def tree_of(ids, parents, prefix_len):
    """Rows whose tokens are their ids."""
    return TreeRows.within(prefix_len=prefix_len, node_ids=ids, tokens=ids % 61, parent_ids=parents)
