"""The key/value cache of one request: a prefix region, then a tree region (PipeDec 3.4.2).

Slot ``s < cached_len`` stores the committed token at position ``s``. The entries of the tree region
follow in any order: the ancestors that come with a row determine what it sees (SwiftSpec 3.2), so a
commit may move entries from the end into the slots of dropped ones.

Invariant: after each commit the prefix region equals a fresh forward over the first ``cached_len``
committed tokens, and each entry of the tree region equals a fresh forward over its path.

Shape letters: L layers, G key/value heads, D head size, C capacity in slots, R rows of one pass
(prefix rows, then W tree rows), T entries of the tree region.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specdec.attention.kv_storage import Buffers, CacheSpec, Contiguous, Storage, Store
from specdec.types import BoolArray, Commit, CommitKind, IntArray, TreeRows

EMPTY: IntArray = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows of one request in one forward pass; ``start`` is the slot of the first in ``cache``.

    Attributes:
        tokens: int64[R], prefix rows first, then tree nodes.
        positions: int64[R], absolute positions.
        node_ids: int64[W].
        num_prefix: R - W.
        first_masked: every row sees all slots before this one.
        visible: bool[R, start + R - first_masked]: the slots from ``first_masked`` on that each row
            sees.
    """

    cache: TreeCache
    tokens: IntArray
    positions: IntArray
    node_ids: IntArray
    num_prefix: int
    start: int
    first_masked: int
    visible: BoolArray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def causal(self) -> bool:
        """Returns whether every row sees all slots up to its own."""
        num_later = len(self.tokens) * (len(self.tokens) - 1) // 2  # pairs of a row and a later row
        return int(np.count_nonzero(self.visible)) == self.visible.size - num_later

    @property
    def end(self) -> int:
        """Returns the number of used slots including the rows."""
        return self.start + len(self.tokens)


class TreeCache:
    """Keys and values of one request in one runner, for all layers.

    Attributes:
        cached_len: committed tokens in the prefix region. ``rows`` already counts the rows that it
            returns; the runner's ``forward`` writes their keys and values.
        node_ids: int64[T], node ids of the tree region, in slot order.
        node_positions: int64[T], their absolute positions.
    """

    def __init__(self, *, spec: CacheSpec, capacity: int, storage: Storage | None = None) -> None:
        """Creates an empty cache, which grows beyond ``capacity`` slots as needed."""
        if capacity < 1:
            raise ValueError(f"cache capacity {capacity} must be at least 1 slot")
        self.spec = spec
        self.cached_len = 0
        self.node_ids = self.node_positions = EMPTY
        self._kv = Contiguous(make=spec.empty, capacity=capacity) if storage is None else storage
        self._step = -1

    # State.

    @property
    def capacity(self) -> int:
        return self._kv.capacity

    @property
    def storage(self) -> Tensor:
        """Returns keys and values of all slots, [L, 2, G, C, D]; a copy if storage is paged."""
        return self._kv.contents()

    def writer(self, rows: Rows) -> Store:
        """Returns write and read access for the pass over ``rows``."""
        return self.slot_writer(rows.start, rows.end)

    def slot_writer(self, start: int, end: int) -> Store:
        """Returns access for a pass whose rows have the slots ``start`` .. ``end`` - 1."""
        return self._kv.writer(start, end)

    def buffers(self, rows: Rows) -> Buffers:
        """Returns memory for a pass that writes the keys and values of ``rows`` itself."""
        return self._kv.buffers(rows.start, rows.end)

    @property
    def num_nodes(self) -> int:
        return len(self.node_ids)

    def has(self, node_ids: IntArray) -> BoolArray:
        """Returns bool[W]: which of ``node_ids``[W] have entries in the tree region."""
        return np.isin(node_ids, self.node_ids)

    def key_positions(self, end: int) -> IntArray:
        """Returns the absolute positions, int64[end], of the entries in the first ``end`` slots."""
        positions = np.arange(end)
        positions[self.cached_len : end] = self.node_positions[: end - self.cached_len]
        return positions

    # Growing.

    def rows(self, *, prefix_tokens: IntArray = EMPTY, tree: TreeRows | None = None) -> Rows:
        """Reserves slots for the rows of one pass; ``ModelRunner.forward`` must follow.

        ``prefix_tokens``, int64[R - W], are allowed only while the tree region is empty. They get
        the positions from ``cached_len`` on and causal visibility. A node sees the prefix, its
        ancestors among the entries and the earlier rows, and itself; the mask need not be square
        (SwiftSpec 3.1). Nodes whose parents have no entry follow the last token of the prefix.
        """
        start, num_prefix = self.cached_len + self.num_nodes, len(prefix_tokens)
        num_rows = num_prefix + (0 if tree is None else len(tree.tokens))
        self._kv.reserve(start + num_rows, start)
        if num_prefix:
            assert not self.num_nodes, "committed tokens are missing below entries of the tree"
            self.cached_len += num_prefix
        if tree is not None and not num_prefix:
            tokens, positions = tree.tokens, tree.positions
            first_masked, visible = self.cached_len, self._append(tree, positions)
        else:
            tokens, positions = prefix_tokens, np.arange(start, start + num_prefix)
            first_masked, visible = start, np.tri(num_rows, dtype=np.bool_)
            if tree is not None:
                tokens = np.concatenate([tokens, tree.tokens])
                positions = np.concatenate([positions, tree.positions])
                visible[num_prefix:, num_prefix:] = self._append(tree, tree.positions)
        return Rows(
            cache=self,
            tokens=tokens,
            positions=positions,
            node_ids=EMPTY if tree is None else tree.node_ids,
            num_prefix=num_prefix,
            start=start,
            first_masked=first_masked,
            visible=visible,
        )

    def _append(self, tree: TreeRows, positions: IntArray) -> BoolArray:
        """Adds entries for W nodes; returns bool[W, T + W], which entries each node sees."""
        old = self.num_nodes
        ids = self.node_ids = np.concatenate([self.node_ids, tree.node_ids])
        self.node_positions = np.concatenate([self.node_positions, positions])
        if not old and len(ids) == 1:  # plain decoding
            assert positions[0] == self.cached_len, f"{ids} does not continue the cached prefix"
            return np.ones((1, 1), np.bool_)
        order = ids.argsort()
        assert (np.diff(ids[order]) > 0).all(), f"one of {tree.node_ids} has an entry already"
        at = order.take(ids[order].searchsorted(tree.paths), mode="clip")
        visible = np.zeros((len(positions), len(ids)), np.bool_)
        levels, rows = (ids[at] == tree.paths).nonzero()
        visible[rows, at[levels, rows]] = True
        # A path has one node per position behind the prefix; what is missing is not in the cache.
        is_whole = np.count_nonzero(visible, axis=1) == positions - self.cached_len + 1
        assert is_whole.all(), f"some of {tree.node_ids} do not continue the cached paths"
        assert not np.triu(visible[:, old:], 1).any(), f"children before parents: {tree.node_ids}"
        return visible

    # Shrinking.

    def commit(self, commit: Commit) -> None:
        """Moves retired entries into the prefix, keeps the kept entries and drops the others.

        Retired nodes are moved in path order as long as they have entries and continue the prefix.
        If some have none, ``cached_len`` < ``commit.prefix_len`` afterwards, and the missing tokens
        must be passed as ``prefix_tokens``. One gather over all layers copies only the entries that
        change slots. A second call for the same step does nothing.
        """
        if commit.step <= self._step:
            return
        self._step = commit.step
        adopted, kept = self._adoptable(commit), EMPTY
        # On a miss the only kept node is the new root, which has no entry yet.
        is_hit = commit.kind is CommitKind.HIT
        if is_hit and self.cached_len + len(adopted) >= commit.prefix_len:
            kept = commit.keeps(self.node_ids).nonzero()[0]
        new = kept
        if len(kept):
            # Kept entries inside the new region keep their slots; the others fill the free slots.
            new = np.full(len(kept), -1)
            inside = (kept >= len(adopted)) & (kept < len(adopted) + len(kept))
            new[kept[inside] - len(adopted)] = kept[inside]
            new[new < 0] = kept[~inside]
        sources = np.concatenate([adopted, new])
        moved = (sources != np.arange(len(sources))).nonzero()[0]
        if len(moved):
            self._copy_slots(self.cached_len + sources[moved], self.cached_len + moved)
        self.cached_len += len(adopted)
        self.node_ids, self.node_positions = self.node_ids[new], self.node_positions[new]
        self._kv.trim(self.cached_len + self.num_nodes)

    def truncate(self, length: int) -> None:
        """Drops the tree region and the prefix beyond ``length`` tokens."""
        self.cached_len = min(self.cached_len, length)
        self.node_ids = self.node_positions = EMPTY
        self._kv.trim(self.cached_len)

    def close(self) -> None:
        """Frees all slots; the cache must not be used afterwards."""
        self._kv.trim(0)

    def _adoptable(self, commit: Commit) -> IntArray:
        """Returns the entries of retired nodes, int64[M], that extend the prefix, in path order."""
        entries = {node: entry for entry, node in enumerate(self.node_ids.tolist())}
        adopted: list[int] = []
        position = commit.prefix_len - len(commit.retired_ids)
        for entry in map(entries.get, commit.retired_ids.tolist()):
            if position >= self.cached_len:
                if entry is None or position != self.cached_len + len(adopted):
                    break
                adopted.append(entry)
            position += 1
        return np.array(adopted, np.int64)

    def _copy_slots(self, sources: IntArray, targets: IntArray) -> None:
        """Copies keys and values between slots; tests replace this method to inject faults."""
        self._kv.copy(sources, targets)
