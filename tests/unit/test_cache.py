"""What a cache does at a commit, which slots its rows see, and the pool that it takes blocks of.

That its entries equal fresh forwards: test_random_forests.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.attention.tree_attention import (
    BlockPool,
    CacheSpec,
    Contiguous,
    RequestPart,
    Rows,
    TreeCache,
    host_mask,
)
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
    for _ in range(2):  # a repeated commit has no effect
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


SPEC = CacheSpec(
    num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu")
)


@pytest.mark.parametrize("seed", range(12))
def test_a_row_sees_the_prefix_its_ancestors_and_itself(seed):
    """A part of a tree behind a prompt's chunk, then the rest of it; whole passes and cut ones."""
    rng = np.random.default_rng(seed)
    cached, chunk, num, first = rng.integers((0, 0, 2, 1), (5, 4, 9, 2)).tolist()
    parents = np.array([rng.integers(-1, i) for i in range(num)])
    tree = tree_of(np.arange(num), parents, cached + chunk)
    cache = TreeCache(spec=SPEC, capacity=1)
    cache.rows(prefix_tokens=np.arange(cached))
    rows = cache.rows(prefix_tokens=np.arange(chunk), tree=tree.take(np.arange(first)))
    check_visible(rows, cached, chunk, parents[:first])
    rows = cache.rows(tree=tree.take(np.arange(first, num)))
    check_visible(rows, cached, chunk, parents)


def check_visible(rows: Rows, cached: int, chunk: int, parents: np.ndarray) -> None:
    prefix, start = cached + chunk, rows.start
    paths = [list[int]() for _ in parents]  # of each node, the slots of its ancestors and its own
    for node, parent in enumerate(parents.tolist()):
        paths[node] = [*(paths[parent] if parent >= 0 else ()), prefix + node]
    slots = [*range(prefix), *(prefix + len(path) - 1 for path in paths)]  # their positions
    sees = np.tri(len(slots), dtype=bool)
    for node, path in enumerate(paths):
        sees[prefix + node, prefix:] = np.isin(np.arange(prefix, len(slots)), path)
    for begin in range(len(rows)):
        for end in range(begin + 1, len(rows) + 1):
            part = rows.cut(begin, end)
            taken, stop = slice(start + begin, start + end), start + end
            seen, position = sees[taken, :stop], np.array(slots)
            causal = np.tri(stop, dtype=bool)[taken]
            assert part.end == stop
            assert part.positions.tolist() == slots[taken]
            assert part.node_ids.tolist() == [i - prefix for i in range(stop)[taken] if i >= prefix]
            assert part.causal == (seen == causal).all()
            for window in (None, 1, 3, 99):
                near = position[:stop] > position[taken, None] - (window or 99)
                found = RequestPart(part).seen
                for more in (0, 5):  # slots beyond those in use
                    mask = replace(found, num_slots=stop + more).mask(window) == 0
                    assert np.array_equal(mask[:, :stop], seen & near)
                    assert not mask[:, stop:].any()
                mask = host_mask(part, window)
                assert np.array_equal(causal if mask is None else mask == 0, seen & near)


def test_a_cache_that_grows_adds_little():
    """32,896 slots, and one more: not twice as many."""
    memory = Contiguous(make=SPEC.empty, capacity=32_896)
    memory.tensor[:] = 1.0
    memory.reserve(32_897, 32_896)
    assert 32_897 <= memory.capacity <= 1.05 * 32_897
    assert (memory.tensor[:, :, :, :32_896] == 1.0).all()


def test_a_pool_grows_with_its_blocks_and_gives_each_once():
    pool = BlockPool(spec=SPEC, num_blocks=70, block_tokens=2)
    first = pool.take(64)
    pool.rows[:] = 1.0
    assert sorted([*first, *pool.take(6)]) == list(range(70))
    assert pool.rows.shape[3] == 140, "no more than the pool may have"
    assert (pool.rows[:, :, :, :128] == 1.0).all()
    with pytest.raises(RuntimeError, match="only 0 of 70 are free"):
        pool.take(1)
    pool.give_back(first)
    assert (pool.num_used, pool.peak) == (6, 70)
    assert sorted(pool.take(64)) == sorted(first)
