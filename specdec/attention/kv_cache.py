"""One request's keys and values: the prefix region, then the tree region (PipeDec 3.4.2).

Letters: L layers, H key/value heads, D head size, C capacity in slots, R rows of one pass (prefix
rows, then W tree rows), T entries of the tree region.

Slot ``s < cached_len`` holds the committed token at position ``s``. The entries of the tree region
follow in no particular order: which of them a row may see is said by a matrix of ancestors, not by
where they lie (SwiftSpec 3.2), so a commit may fill the holes of dropped entries from the end.

Invariant: after each commit the prefix region equals a fresh forward over the committed tokens, as
far as ``cached_len``, and each entry of the tree equals a fresh forward over its path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy import count_nonzero

from specdec.attention.kv_storage import CacheSpec, Contiguous, PassView, Storage
from specdec.types import BoolArray, Commit, CommitKind, IntArray

EMPTY: IntArray = np.zeros(0, np.int64)
"""No tokens, or no nodes."""

_ABSENT = -1
_FEW = 8  # up to so many nodes plain numbers are cheaper than arrays
_FRESH_ENTRIES = 128  # entries that a new cache keeps books of before it grows them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows of one request in one forward pass, and where they lie in its cache.

    Attributes:
        cache: the request's cache; the rows hold its slots ``start .. start + len(self)``.
        tokens: int64[R], prefix rows first, then tree nodes.
        positions: int64[R], absolute positions.
        node_ids: int64[W], ids of the tree nodes.
        num_prefix: R - W, rows that extend the prefix region.
        start: slot of the first row.
        first_masked: every row sees every slot before this one ...
        visible: bool[R, start + R - first_masked] ... and of the slots from there on these.
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
        """Slots of the cache that are in use once the rows are in it."""
        return self.start + len(self.tokens)


class TreeCache:
    """Keys and values of one request in one runner, for all layers.

    Attributes:
        spec: shape and type of what is stored.
        cached_len: committed tokens in the prefix region. Rows count from ``rows`` on; their values
            are there once the runner's ``forward`` has seen them.
    """

    def __init__(self, *, spec: CacheSpec, capacity: int, storage: Storage | None = None) -> None:
        """Allocates room for ``capacity`` slots (more is made when it runs short).

        ``storage`` says where they lie; in a tensor of the cache's own where omitted.

        Raises:
            ValueError: for a capacity below 1.
        """
        if capacity < 1:
            raise ValueError(f"cache capacity {capacity} must be at least 1 token")
        self.spec = spec
        self.cached_len = 0
        self._kv = Contiguous(make=spec.empty, capacity=capacity) if storage is None else storage
        # Entries are kept by coordinate = slot - origin, so that moving the border between the
        # regions moves nothing: the tree region is the coordinates lo .. hi.
        self._origin = self._lo = self._hi = 0
        self._ids = np.zeros(_FRESH_ENTRIES, np.int64)
        self._positions = np.zeros(_FRESH_ENTRIES, np.int64)
        self._ancestors = np.zeros((_FRESH_ENTRIES, _FRESH_ENTRIES), np.bool_)
        # Coordinate of id i at [i - base]; both ends stay absent, to serve ids out of range.
        self._table = np.full(_FRESH_ENTRIES, _ABSENT, np.int64)
        self._base = 0
        self._step = -1

    # ------------------------------------------------------------------ asking

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self._kv.capacity

    @property
    def storage(self) -> torch.Tensor:
        """[L, 2, H, C, D], keys and values of all slots; a copy where they are paged."""
        return self._kv.held(self.capacity)

    def view(self, rows: Rows) -> PassView:
        """What the pass over ``rows`` writes and reads."""
        return self._kv.view(rows.start, rows.end)

    @property
    def num_nodes(self) -> int:
        """Entries of the tree region."""
        return self._hi - self._lo

    @property
    def node_ids(self) -> IntArray:
        """int64[T], ids of the entries of the tree region, in slot order."""
        return self._ids[self._lo : self._hi]

    @property
    def node_positions(self) -> IntArray:
        """int64[T], absolute positions of the entries, in slot order."""
        return self._positions[self._lo : self._hi]

    def has(self, node_ids: IntArray) -> BoolArray:
        """bool[W]: which of ``node_ids``[W] are entries of the tree region."""
        return self._find(node_ids) != _ABSENT

    def key_positions(self, end: int) -> IntArray:
        """int64[end]: the position of what each of the first ``end`` slots holds."""
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

        Committed tokens come first, at the positions from ``cached_len`` on; they see what is
        before them. A node sees the prefix, those ancestors that are entries or earlier rows, and
        itself; the block need not be square (SwiftSpec 3.1).

        Args:
            prefix_tokens: int64[R - W]; only while the tree region is empty.
            node_ids: int64[W], parents before children.
            node_tokens: int64[W].
            parent_ids: int64[W]; a parent that is no entry must be the last token of the prefix.
            node_positions: int64[W], absolute.
        """
        start = self.cached_len + self.num_nodes
        num_prefix, num_rows = len(prefix_tokens), len(prefix_tokens) + len(node_ids)
        self._kv.reserve(start + num_rows, start)
        if not num_prefix:
            return Rows(
                cache=self,
                tokens=node_tokens,
                positions=node_positions,
                node_ids=node_ids,
                num_prefix=0,
                start=start,
                first_masked=self.cached_len,
                visible=self._append(node_ids, parent_ids, node_positions),
            )
        assert not self.num_nodes, "committed tokens are missing below entries of the tree"
        self.cached_len += num_prefix
        self._origin = self.cached_len
        visible = np.tri(num_rows, dtype=np.bool_)
        if len(node_ids):
            block = self._append(node_ids, parent_ids, node_positions)
            visible[num_prefix:, num_prefix:] = block
        prefix_positions = np.arange(start, start + num_prefix)
        return Rows(
            cache=self,
            tokens=np.concatenate([prefix_tokens, node_tokens]),
            positions=np.concatenate([prefix_positions, node_positions]),
            node_ids=node_ids,
            num_prefix=num_prefix,
            start=start,
            first_masked=start,
            visible=visible,
        )

    def _append(self, ids: IntArray, parent_ids: IntArray, positions: IntArray) -> BoolArray:
        """Enters W nodes; returns bool[W, T + W], which entries each of them sees."""
        num = len(ids)
        if num <= _FEW:
            return self._append_few(ids, parent_ids, positions)
        self._claim(ids)
        lo, hi = self._lo, self._hi
        new_hi = hi + num
        coordinates = np.arange(hi, new_hi)
        rank = ids - self._base
        assert count_nonzero(self._table[rank] == _ABSENT) == num, (
            f"some of nodes {ids} are entries already"
        )
        self._table[rank] = coordinates
        self._ids[hi:new_hi] = ids
        self._positions[hi:new_hi] = positions
        self._hi = new_hi
        parents = self._find(parent_ids)
        orphans = parents == _ABSENT
        above = np.where(orphans, self.cached_len - 1, self._positions[parents])
        assert count_nonzero(positions == above + 1) == num, (
            f"nodes {ids} at positions {positions} do not continue their parents {parent_ids} "
            f"at {above} (prefix of {self.cached_len} tokens)"
        )
        assert count_nonzero(parents < coordinates) == num, (
            f"nodes {ids} come before their parents {parent_ids}"
        )
        ancestors = self._ancestors
        ancestors[lo:hi, hi:new_hi] = False
        block = ancestors[hi:new_hi, lo:new_hi]
        block[:] = ancestors[parents, lo:new_hi]
        block[orphans] = False
        ancestors[coordinates, coordinates] = True
        for row in np.flatnonzero(parents >= hi).tolist():  # whole trees at once: parents first
            block[row] = block[parents[row] - hi]
            block[row, hi - lo + row] = True
        return block

    def _append_few(self, ids: IntArray, parent_ids: IntArray, positions: IntArray) -> BoolArray:
        """``_append`` of a few nodes by plain numbers: some 20 array calls would cost more."""
        if len(ids):
            self._claim(ids)
        lo, hi, new_hi = self._lo, self._hi, self._hi + len(ids)
        table, base, last = self._table, self._base, len(self._table) - 1
        ancestors = self._ancestors
        ancestors[lo:new_hi, hi:new_hi] = ancestors[hi:new_hi, lo:new_hi] = False
        block = ancestors[hi:new_hi, lo:new_hi]
        for row, (node, above, position) in enumerate(
            zip(ids.tolist(), parent_ids.tolist(), positions.tolist(), strict=True)
        ):
            at = above - base
            parent = int(table[at]) if 0 < at < last else _ABSENT
            level = self.cached_len - 1 if parent == _ABSENT else int(self._positions[parent])
            assert table[node - base] == _ABSENT, f"node {node} is among the entries already"
            assert position == level + 1, f"node {node} does not continue its parent {above}"
            coordinate = hi + row
            table[node - base] = coordinate
            self._ids[coordinate] = node
            self._positions[coordinate] = position
            if parent != _ABSENT:
                block[row] = ancestors[parent, lo:new_hi]
            block[row, coordinate - lo] = True
        self._hi = new_hi
        return block

    # ------------------------------------------------------------------ shrinking

    def commit(self, commit: Commit) -> None:
        """Moves retired entries into the prefix, keeps the kept ones and drops the rest.

        Retired nodes are taken in path order as far as they are entries and continue the prefix;
        a cache that did not hold them all is behind afterwards (``cached_len`` <
        ``commit.prefix_len``) and catches up by ``prefix_tokens``. One gather over all layers, of
        the entries only that do not lie in their place already. A second call for the same step
        does nothing.
        """
        if commit.kind is CommitKind.NONE or commit.step <= self._step:
            return
        self._step = commit.step
        if not self.num_nodes:
            return
        adopted = self._adoptable(commit)
        lo = self._lo + len(adopted)
        kept = np.zeros(0, np.int64)
        if self.cached_len + len(adopted) >= commit.prefix_len:
            kept = self._lo + np.flatnonzero(commit.keeps(self.node_ids))
        hi = lo + len(kept)
        # Kept entries inside the new region stay; the others fill its holes.
        inside = (kept >= lo) & (kept < hi)
        leaving = kept[~inside]
        holes = np.ones(len(kept), np.bool_)
        holes[kept[inside] - lo] = False
        sources = np.concatenate([adopted, leaving])
        targets = np.concatenate([np.arange(self._lo, lo), lo + np.flatnonzero(holes)])
        moved = sources != targets
        self._table[self.node_ids - self._base] = _ABSENT
        if moved.any():
            self._move(sources[moved], targets[moved], lo, hi)
        self.cached_len += len(adopted)
        self._lo, self._hi = lo, hi
        if len(kept):
            self._table[self.node_ids - self._base] = np.arange(lo, hi)
        else:
            self._clear()
        self._kv.trim(self.cached_len + self.num_nodes)

    def close(self) -> None:
        """Gives all slots back; the cache must not be used any more."""
        self._kv.trim(0)

    def truncate(self, length: int) -> None:
        """Drops the tree and the part of the prefix beyond ``length`` tokens."""
        self._table[self.node_ids - self._base] = _ABSENT
        self.cached_len = min(self.cached_len, length)
        self._clear()
        self._kv.trim(self.cached_len)

    def _adoptable(self, commit: Commit) -> IntArray:
        """int64[M], coordinates of the retired nodes that can extend the prefix."""
        adopted: list[int] = []
        position = commit.prefix_len - len(commit.retired_ids)
        for coordinate in self._find(commit.retired_ids).tolist():
            if position >= self.cached_len:
                if coordinate == _ABSENT or position != self.cached_len + len(adopted):
                    break
                adopted.append(coordinate)
            position += 1
        return np.array(adopted, np.int64)

    def _move(self, sources: IntArray, targets: IntArray, lo: int, hi: int) -> None:
        """Copies entries to other coordinates; [lo, hi) is the tree region afterwards."""
        self._copy_slots(sources + self._origin, targets + self._origin)
        self._ids[targets] = self._ids[sources]
        self._positions[targets] = self._positions[sources]
        columns = slice(self._lo, self._hi)
        self._ancestors[targets, columns] = self._ancestors[sources, columns]
        # Dropped entries are nobody's ancestors, so only the moved columns need to move.
        live = self._ancestors[lo:hi]
        live[:, targets] = live[:, sources]

    def _copy_slots(self, sources: IntArray, targets: IntArray) -> None:
        self._kv.copy(sources, targets)

    def _clear(self) -> None:
        self._origin = self.cached_len
        self._lo = self._hi = 0

    # ------------------------------------------------------------------ books

    def _find(self, ids: IntArray) -> IntArray:
        """int64[W], coordinates of ids; ``_ABSENT`` where there is no such entry."""
        return self._table.take(ids - self._base, mode="clip")

    def _claim(self, ids: IntArray) -> None:
        """Makes room in the books for new entries with these ids."""
        need, size = self._hi + len(ids), len(self._ids)
        if need > size:
            self._rebase(size if 2 * (need - self._lo) <= size else 2 * need)
        low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
        if low > self._base and high - self._base < len(self._table) - 1:
            return
        live = self.node_ids
        if len(live):
            low, high = min(low, int(live.min())), max(high, int(live.max()))
        self._base = low - 1
        self._table = np.full(max(2 * (high - low + 3), len(self._table)), _ABSENT, np.int64)
        self._table[live - self._base] = np.arange(self._lo, self._hi)

    def _rebase(self, size: int) -> None:
        """Moves the books of the tree region to coordinate 0, in arrays of ``size`` entries."""
        lo, num = self._lo, self.num_nodes
        ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
        ancestors = np.zeros((size, size), np.bool_)
        ids[:num] = self.node_ids
        positions[:num] = self.node_positions
        ancestors[:num, :num] = self._ancestors[lo : self._hi, lo : self._hi]
        self._table[self.node_ids - self._base] -= lo
        self._ids, self._positions, self._ancestors = ids, positions, ancestors
        self._origin += lo
        self._lo, self._hi = 0, num
