"""After any sequence of appends and commits, ``TreeCache`` equals fresh forwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.clocks.meter import Meter
from specdec.models.random import random_model
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.types import NO_NODE, Commit, CommitKind, TreeRows

TOLERANCE = 1e-12  # float64; what is left comes from the order of sums


@pytest.fixture(scope="module")
def runner():
    model = random_model("llama", dtype="float64", num_layers=2)
    return ModelRunner(model=model, name="target", meter=Meter())


class Script:
    """A request whose tree grows and is committed at random.

    Attributes:
        paths: node id -> tokens of the whole sequence up to the node.
    """

    def __init__(self, runner, seed, capacity=8):
        self.rng = np.random.default_rng(seed)
        self.runner, self.cache = runner, runner.new_cache(capacity)
        self.tokens = self.rng.integers(3, 61, 6).tolist()  # committed, the root last
        self.next_id, self.step = 5, 0
        self.paths, self.parents = {}, {}
        self.root = self._new_node(NO_NODE, self.tokens)
        self.feed([])

    def _new_node(self, parent, path):
        node, self.next_id = self.next_id, self.next_id + 1
        self.paths[node], self.parents[node] = list(path), parent
        return node

    def feed(self, nodes):
        """Runs missing committed tokens and ``nodes`` through the model."""
        missing = self.tokens[self.cache.cached_len : -1]
        known = [*self.parents]
        tree = TreeRows.within(
            prefix_len=len(self.tokens) - 1,
            node_ids=np.array(known),
            tokens=np.array([self.paths[n][-1] for n in known]),
            parent_ids=np.array([self.parents[n] for n in known]),
        )
        rows = self.cache.rows(
            prefix_tokens=np.array(missing, np.int64),
            tree=tree.take(np.array([known.index(n) for n in nodes], np.int64)),
        )
        if not len(rows):
            return
        logits = self.runner.forward([rows]).logits[rows.num_prefix :]
        for node, row in zip(nodes, logits, strict=True):
            fresh = fresh_cache(self.runner, self.paths[node])[1][-1]
            assert (row - fresh).abs().max() < TOLERANCE

    def grow(self):
        """Submits some nodes whose parents are entries, or earlier in the same batch."""
        live = self.cache.node_ids.tolist()
        batch = [] if self.root in live else [self.root]
        for _ in range(int(self.rng.choice([0, 1, 1, 2, 3, 5]))):
            options = live + batch
            parent = options[int(self.rng.integers(len(options)))] if options else None
            if parent is None:
                break
            taken = {self.paths[n][-1] for n in self.parents if self.parents[n] == parent}
            token = int(self.rng.choice([t for t in range(3, 61) if t not in taken]))
            batch.append(self._new_node(parent, [*self.paths[parent], token]))
        self.feed(batch)

    def commit(self):
        """Follows a random path from the root and commits it, as a hit or as a miss."""
        path, live = [self.root], set(self.cache.node_ids.tolist())
        while self.rng.random() < 0.6:
            below = [n for n in self.parents if self.parents[n] == path[-1] and n in live]
            if not below:
                break
            path.append(below[int(self.rng.integers(len(below)))])
        below = [n for n in self.parents if self.parents[n] == path[-1]]
        hit = bool(below) and self.rng.random() < 0.7
        if hit:
            root = below[int(self.rng.integers(len(below)))]
            kept = {root}
            for node in sorted(self.parents):
                if self.parents[node] in kept:
                    kept.add(node)
        else:
            root = self._new_node(NO_NODE, [*self.paths[path[-1]], 1])
            kept = {root}
        commit = Commit(
            request=0,
            step=self.step,
            kind=CommitKind.HIT if hit else CommitKind.MISS,
            retired_ids=np.array(path),
            retired_tokens=np.array([self.paths[n][-1] for n in path]),
            next_token=self.paths[root][-1],
            root_id=root,
            prefix_len=len(self.paths[root]) - 1,
            kept_ids=np.array(sorted(kept)),
        )
        self.cache.commit(commit)
        self.cache.commit(commit)  # idempotent by step
        self.step += 1
        self.tokens, self.root = list(self.paths[root]), root
        self.parents = {n: p for n, p in self.parents.items() if n in kept}
        self.parents[root] = NO_NODE
        assert set(self.cache.node_ids.tolist()) == live & kept

    def check(self):
        """The invariant, entry by entry, against fresh forwards."""
        cache = self.cache
        assert cache.cached_len <= len(self.tokens) - 1
        known = fresh_cache(self.runner, self.tokens)[0][:, :, :, : cache.cached_len]
        held = cache.storage[:, :, :, : cache.cached_len]
        assert (held - known).abs().max() < TOLERANCE
        for place, node in enumerate(cache.node_ids.tolist()):
            known = fresh_cache(self.runner, self.paths[node])[0][:, :, :, -1]
            held = cache.storage[:, :, :, cache.cached_len + place]
            assert (held - known).abs().max() < TOLERANCE, f"node {node}"


def fresh_cache(runner, tokens):
    """Stored keys and values [L, 2, H, T, D] and logits of one forward over ``tokens``."""
    cache = runner.new_cache(len(tokens))
    output = runner.forward([cache.rows(prefix_tokens=np.array(tokens, np.int64))])
    return cache.storage, output.logits


@pytest.mark.parametrize("seed", range(8))
def test_random_scripts(runner, seed):
    """Random growth and commits; the capacity must grow."""
    script = Script(runner, seed)
    for _ in range(9):
        for _ in range(int(script.rng.integers(1, 5))):
            script.grow()
        script.commit()
        script.check()


def test_holes_are_filled_from_the_end(runner):
    """Of ten siblings below the root, only those beyond the new end move."""
    cache = runner.new_cache(16)
    ids = np.arange(11)
    parents = np.array([NO_NODE] + [0] * 10)
    runner.forward([cache.rows(tree=tree_of(ids, parents, 0))])
    before = cache.storage.clone()
    cache.commit(_commit(retired=[0], kept=[1, 3, 4, 9], prefix_len=1))
    assert cache.node_ids.tolist() == [1, 9, 3, 4]
    assert torch.equal(cache.storage[:, :, :, 1:5], before[:, :, :, [1, 9, 3, 4]])


def test_commit_behind_the_root(runner):
    """A leaf accepted without an entry leaves the cache one token behind, without a tree."""
    cache = runner.new_cache(16)
    one = np.array([0])
    runner.forward([cache.rows(tree=tree_of(one, one - 1, 0))])
    cache.commit(_commit(retired=[0, 1], kept=[2], prefix_len=2))
    assert (cache.cached_len, cache.num_nodes) == (1, 0)
    rows = cache.rows(prefix_tokens=one, tree=tree_of(one + 2, one - 1, 2))
    assert rows.positions.tolist() == [1, 2]
    assert rows.visible.tolist() == [[True, False], [True, True]]


def test_root_cached_as_prefix(runner):
    """A source may cache the root itself as a committed token; the commit then skips it."""
    cache = runner.new_cache(16)
    ids = np.arange(1, 3)
    runner.forward([cache.rows(prefix_tokens=np.array([4, 5]))])  # position 1 is the root
    runner.forward([cache.rows(tree=tree_of(ids, ids - 1, 2))])
    cache.commit(_commit(retired=[0], kept=[1, 2], prefix_len=2))
    assert (cache.cached_len, cache.node_ids.tolist()) == (2, [1, 2])


def test_truncate(runner):
    """Truncation drops the tree and the tail."""
    cache = runner.new_cache(4)
    ids = np.arange(2)
    runner.forward([cache.rows(prefix_tokens=np.array([4, 5, 6]))], logits_rows=NO_ROWS)
    runner.forward([cache.rows(tree=tree_of(ids, ids - 1, 3))])
    assert cache.has(np.array([0, 1, 7])).tolist() == [True, True, False]
    cache.truncate(2)
    assert (cache.cached_len, cache.num_nodes) == (2, 0)
    assert not cache.has(ids).any()


def test_ids_far_apart_and_out_of_order(runner):
    """Ids need not be dense, and a smaller id may be added after a larger one."""
    cache = runner.new_cache(4)
    ids, parents = np.array([70_000, 90_000, 70_010]), np.array([-1, 70_000, 70_000])
    tree = tree_of(ids, parents, 0)
    for row in range(3):
        rows = cache.rows(tree=tree.take(np.array([row])))
    assert rows.visible.tolist() == [[True, False, True]]
    asked = np.array([90_000, 70_010, 70_000, 3, 1 << 40])
    assert cache.has(asked).tolist() == [True, True, True, False, False]


def tree_of(ids, parents, prefix_len):
    """Rows whose tokens are their ids."""
    return TreeRows.within(prefix_len=prefix_len, node_ids=ids, tokens=ids % 61, parent_ids=parents)


def _commit(*, retired, kept, prefix_len):
    return Commit(
        request=0,
        step=0,
        kind=CommitKind.HIT,
        retired_ids=np.array(retired, np.int64),
        retired_tokens=np.zeros(len(retired), np.int64),
        next_token=1,
        root_id=kept[0] if kept else 0,
        prefix_len=prefix_len,
        kept_ids=np.array(kept, np.int64),
    )
