"""The key/value cache of one request: a prefix region, then a tree region (PipeDec 3.4.2).

Slot ``s < cached_len`` stores the committed token at position ``s``. The entries of the tree region
follow in any order: an ancestor matrix, not the order of slots, determines what a row sees
(SwiftSpec 3.2), so a commit may move entries from the end into the slots of dropped ones.

Invariant: after each commit the prefix region equals a fresh forward over the first ``cached_len``
committed tokens, and each entry of the tree region equals a fresh forward over its path.

Internally an entry is addressed by its coordinate, slot - origin, so that entries keep their
coordinates when the border between the regions moves.

Shape letters: L layers, G key/value heads, D head size, C capacity in slots, R rows of one pass
(prefix rows, then W tree rows), T entries of the tree region.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specdec.attention.kv_storage import Buffers, CacheSpec, Contiguous, Storage, Store
from specdec.types import BoolArray, Commit, CommitKind, IntArray

EMPTY: IntArray = np.zeros(0, np.int64)
"""An empty array of tokens or nodes."""

_FRESH_ENTRIES = 128  # size of a new cache's index arrays, which grow as needed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows of one request in one forward pass, and their slots in its cache.

    Attributes:
        cache: the request's cache; the rows occupy its slots ``start .. start + len(self) - 1``.
        tokens: int64[R], prefix rows first, then tree nodes.
        positions: int64[R], absolute positions.
        node_ids: int64[W], ids of the tree nodes.
        num_prefix: R - W, rows that extend the prefix region.
        start: slot of the first row.
        first_masked: every row sees all slots before this one.
        visible: bool[R, start + R - first_masked]: the slots from ``first_masked`` on that each
            row sees.
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
    def end(self) -> int:
        """Number of used slots including the rows."""
        return self.start + len(self.tokens)


class TreeCache:
    """Keys and values of one request in one runner, for all layers.

    Attributes:
        spec: shape and type of the keys and values.
        cached_len: committed tokens in the prefix region. ``rows`` already counts the rows that it
            returns; the runner's ``forward`` writes their keys and values.
    """

    def __init__(self, *, spec: CacheSpec, capacity: int, storage: Storage | None = None) -> None:
        """Creates an empty cache.

        Args:
            spec: shape and type of the keys and values.
            capacity: slots to allocate at first; the cache grows as needed.
            storage: memory of the slots; a new contiguous tensor if None.

        Raises:
            ValueError: if ``capacity`` is below 1.
        """
        if capacity < 1:
            raise ValueError(f"cache capacity {capacity} must be at least 1 slot")
        self.spec = spec
        self.cached_len = 0
        self._kv = Contiguous(make=spec.empty, capacity=capacity) if storage is None else storage
        # The tree region has the coordinates lo .. hi - 1; coordinate = slot - origin.
        self._origin = self._lo = self._hi = 0
        self._ids = np.zeros(_FRESH_ENTRIES, np.int64)
        self._positions = np.zeros(_FRESH_ENTRIES, np.int64)
        self._ancestors = np.zeros((_FRESH_ENTRIES, _FRESH_ENTRIES), np.bool_)
        self._index: dict[int, int] = {}  # node id -> coordinate
        self._step = -1

    # ------------------------------------------------------------------ state

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self._kv.capacity

    @property
    def storage(self) -> Tensor:
        """[L, 2, G, C, D], keys and values of all slots; a copy if storage is paged."""
        return self._kv.contents()

    def writer(self, rows: Rows) -> Store:
        """Write and read access for the pass over ``rows``."""
        return self.slot_writer(rows.start, rows.end)

    def slot_writer(self, start: int, end: int) -> Store:
        """The same for a pass whose rows have the slots ``start`` .. ``end`` - 1."""
        return self._kv.writer(start, end)

    def buffers(self, rows: Rows) -> Buffers:
        """Memory for a pass that appends the keys and values of ``rows`` itself."""
        return self._kv.buffers(rows.start, rows.end)

    @property
    def num_nodes(self) -> int:
        """Entries of the tree region."""
        return self._hi - self._lo

    @property
    def node_ids(self) -> IntArray:
        """int64[T], node ids of the tree region, in slot order."""
        return self._ids[self._lo : self._hi]

    @property
    def node_positions(self) -> IntArray:
        """int64[T], absolute positions of the tree region's entries, in slot order."""
        return self._positions[self._lo : self._hi]

    def has(self, node_ids: IntArray) -> BoolArray:
        """bool[W]: which of ``node_ids``[W] have entries in the tree region."""
        return np.array([node in self._index for node in node_ids.tolist()], np.bool_)

    def key_positions(self, end: int) -> IntArray:
        """int64[end]: absolute positions of the entries in the first ``end`` slots."""
        positions = np.arange(end)
        positions[self.cached_len : end] = self.node_positions[: end - self.cached_len]
        return positions

    # ------------------------------------------------------------------ growing

    def rows(
        self,
        *,
        prefix_tokens: IntArray = EMPTY,
        node_ids: IntArray = EMPTY,
        node_tokens: IntArray = EMPTY,
        parent_ids: IntArray = EMPTY,
        node_positions: IntArray = EMPTY,
    ) -> Rows:
        """Reserves slots for the rows of one pass; ``ModelRunner.forward`` must follow.

        Committed tokens come first, at the positions from ``cached_len`` on, with causal
        visibility. A node sees the prefix, its ancestors among the entries and the earlier rows,
        and itself; the mask need not be square (SwiftSpec 3.1).

        Args:
            prefix_tokens: int64[R - W]; only while the tree region is empty.
            node_ids: int64[W], parents before children.
            node_tokens: int64[W].
            parent_ids: int64[W]; a parent without an entry must be the last token of the prefix.
            node_positions: int64[W], absolute.
        """
        start = self.cached_len + self.num_nodes
        num_prefix, num_rows = len(prefix_tokens), len(prefix_tokens) + len(node_ids)
        self._kv.reserve(start + num_rows, start)
        if num_prefix:
            assert not self.num_nodes, "committed tokens are missing below entries of the tree"
            self.cached_len += num_prefix
            self._origin = self.cached_len
        tokens, positions, first_masked = node_tokens, node_positions, self.cached_len
        visible = self._append(node_ids, parent_ids, node_positions)
        if num_prefix:
            tokens = np.concatenate([prefix_tokens, node_tokens])
            positions = np.concatenate([np.arange(start, start + num_prefix), node_positions])
            first_masked, block = start, visible
            visible = np.tri(num_rows, dtype=np.bool_)
            visible[num_prefix:, num_prefix:] = block
        return Rows(
            cache=self,
            tokens=tokens,
            positions=positions,
            node_ids=node_ids,
            num_prefix=num_prefix,
            start=start,
            first_masked=first_masked,
            visible=visible,
        )

    def _append(self, ids: IntArray, parent_ids: IntArray, positions: IntArray) -> BoolArray:
        """Adds entries for W nodes; returns bool[W, T + W], which entries each node sees."""
        lo, hi = self._make_room(len(ids))
        self._ids[self._hi : hi], self._positions[self._hi : hi] = ids, positions
        index, ancestors = self._index, self._ancestors
        ancestors[lo:hi, self._hi : hi] = ancestors[self._hi : hi, lo:hi] = False
        block = ancestors[self._hi : hi, lo:hi]
        # A loop over Python numbers: twenty array calls would cost more for most passes.
        for row, (node, above, position) in enumerate(
            zip(ids.tolist(), parent_ids.tolist(), positions.tolist(), strict=True)
        ):
            parent = index.get(above)
            level = self.cached_len - 1 if parent is None else int(self._positions[parent])
            assert node not in index, f"node {node} has an entry already"
            assert position == level + 1, f"node {node} does not continue its parent {above}"
            index[node] = self._hi + row
            if parent is not None:
                block[row] = ancestors[parent, lo:hi]
            block[row, self._hi + row - lo] = True
        self._hi = hi
        return block

    # ------------------------------------------------------------------ shrinking

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
        if not self.num_nodes:
            return
        adopted = self._adoptable(commit)
        lo = self._lo + len(adopted)
        kept = EMPTY
        # On a miss the only kept node is the new root, which has no entry yet.
        is_hit = commit.kind is CommitKind.HIT
        if is_hit and self.cached_len + len(adopted) >= commit.prefix_len:
            kept = self._lo + commit.keeps(self.node_ids).nonzero()[0]
        hi = lo + len(kept)
        if len(kept) or (adopted and adopted != [*range(self._lo, lo)]):
            self._gather(adopted, kept, lo, hi)
        self.cached_len += len(adopted)
        self._set_region(lo, hi)
        self._kv.trim(self.cached_len + self.num_nodes)

    def _gather(self, adopted: list[int], kept: IntArray, lo: int, hi: int) -> None:
        """Moves adopted entries to the coordinates before ``lo``, kept ones to [lo, hi)."""
        if not len(kept):  # the region is empty afterwards: only keys and values move
            moves = [(source, self._lo + i) for i, source in enumerate(adopted)]
            sources, targets = np.array([move for move in moves if move[0] != move[1]]).T
            self._copy_slots(sources + self._origin, targets + self._origin)
            return
        # Kept entries inside the new region keep their slots; the others fill the free slots.
        inside = (kept >= lo) & (kept < hi)
        outside = kept[~inside]
        free = np.ones(len(kept), np.bool_)
        free[kept[inside] - lo] = False
        sources = np.concatenate([np.array(adopted, np.int64), outside])
        targets = np.concatenate([np.arange(self._lo, lo), lo + np.flatnonzero(free)])
        moved = sources != targets
        if moved.any():
            self._move(sources[moved], targets[moved], lo, hi)

    def close(self) -> None:
        """Frees all slots; the cache must not be used afterwards."""
        self._kv.trim(0)

    def truncate(self, length: int) -> None:
        """Drops the tree region and the prefix beyond ``length`` tokens."""
        self.cached_len = min(self.cached_len, length)
        self._set_region(self._lo, self._lo)
        self._kv.trim(self.cached_len)

    def _adoptable(self, commit: Commit) -> list[int]:
        """The M coordinates of the retired nodes that extend the prefix."""
        adopted: list[int] = []
        position = commit.prefix_len - len(commit.retired_ids)
        for coordinate in map(self._index.get, commit.retired_ids.tolist()):
            if position >= self.cached_len:
                if coordinate is None or position != self.cached_len + len(adopted):
                    break
                adopted.append(coordinate)
            position += 1
        return adopted

    def _move(self, sources: IntArray, targets: IntArray, lo: int, hi: int) -> None:
        """Copies entries to other coordinates; [lo, hi) is the tree region afterwards."""
        self._copy_slots(sources + self._origin, targets + self._origin)
        self._ids[targets] = self._ids[sources]
        self._positions[targets] = self._positions[sources]
        columns = slice(self._lo, self._hi)
        self._ancestors[targets, columns] = self._ancestors[sources, columns]
        # Dropped entries are ancestors of no kept entry, so only the moved columns change.
        live = self._ancestors[lo:hi]
        live[:, targets] = live[:, sources]

    def _copy_slots(self, sources: IntArray, targets: IntArray) -> None:
        """Copies keys and values between slots; tests replace it to plant faults."""
        self._kv.copy(sources, targets)

    # ------------------------------------------------------------------ index

    def _set_region(self, lo: int, hi: int) -> None:
        """Makes lo .. hi - 1 the tree region's coordinates, or 0 .. -1 if it is empty."""
        if lo == hi:
            self._origin = self.cached_len
            lo = hi = 0
        self._lo, self._hi = lo, hi
        self._index = dict(zip(self.node_ids.tolist(), range(lo, hi), strict=True))

    def _make_room(self, num: int) -> tuple[int, int]:
        """Grows the index arrays for new entries; returns the coordinates lo, hi afterwards."""
        need, size, used = self._hi + num, len(self._ids), self.num_nodes
        if need > size:  # moves the region to coordinate 0, in larger arrays if it needs them
            size = size if 2 * (need - self._lo) <= size else 2 * need
            ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
            ancestors = np.zeros((size, size), np.bool_)
            region = slice(self._lo, self._hi)
            ids[:used], positions[:used] = self._ids[region], self._positions[region]
            ancestors[:used, :used] = self._ancestors[region, region]
            self._ids, self._positions, self._ancestors = ids, positions, ancestors
            self._origin += self._lo
            self._set_region(0, used)
        return self._lo, self._hi + num
