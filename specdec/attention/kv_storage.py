"""Where a cache's keys and values lie: one stretch per request, or blocks of a common pool.

Letters: L layers, H key/value heads, D head size, C capacity in slots, n slots in use, R rows.

A cache counts slots; storage says where they are. Contiguous storage is read in place. Paged
storage (PagedAttention, Kwon et al. 2023; SpecPipe 4) maps slot ``s`` through a block table to row
``table[s // block] * block + s % block`` of a pool that all requests of a stage share, and gathers
what a pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from specdec.device import to_device
from specdec.types import IntArray

_FIRST_BLOCKS = 64  # of a new pool

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What the layers of one runner need of a cache.

    Attributes:
        num_layers: layers of the slice.
        num_kv_heads: key/value heads of each.
        head_dim: size of one head.
        dtype, device: of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, num_slots: int) -> torch.Tensor:
        """[L, 2, H, num_slots, D], not initialised."""
        shape = (self.num_layers, 2, self.num_kv_heads, num_slots, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class PassView(Protocol):
    """What one pass writes and reads."""

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Writes the rows' keys and values, [1, H, R, D] each; returns all, [1, H, n, D] each."""
        ...


class Storage(Protocol):
    """Slots of one request."""

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        ...

    def reserve(self, end: int, used: int) -> None:
        """Makes room for ``end`` slots, keeping the first ``used``."""
        ...

    def view(self, start: int, end: int) -> PassView:
        """For a pass whose rows are the slots ``start`` .. ``end`` - 1."""
        ...

    def held(self, num_slots: int) -> torch.Tensor:
        """[L, 2, H, n, D]: the first slots; not to be written to where storage is paged."""
        ...

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copies slots, over all layers; every source is read before any target is written."""
        ...

    def trim(self, used: int) -> None:
        """Gives back what lies beyond the first ``used`` slots, where others can use it."""
        ...


class Contiguous:
    """One tensor of the request's own.

    Attributes:
        tensor: [L, 2, H, C, D], keys and values.
    """

    def __init__(self, *, make: Callable[[int], torch.Tensor], capacity: int) -> None:
        """Allocates room for ``capacity`` slots; ``make`` gives tensors of so many."""
        self._make = make
        self._allocate(capacity)

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self.tensor.shape[3]

    def reserve(self, end: int, used: int) -> None:
        """Makes room for ``end`` slots, keeping the first ``used``."""
        if end > self.capacity:
            old = self.tensor
            self._allocate(max(end, 2 * self.capacity))
            self.tensor[:, :, :, :used] = old[:, :, :, :used]

    def view(self, start: int, end: int) -> PassView:
        """Reads and writes in place."""
        return _InPlace(self._flat, start, end)

    def held(self, num_slots: int) -> torch.Tensor:
        """[L, 2, H, n, D], a view."""
        return self.tensor[:, :, :, :num_slots]

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """One gather over all layers, then one write per run of neighbouring targets."""
        index = to_device(sources, self.tensor.device)
        gathered = self.tensor.index_select(3, index)
        cuts = np.flatnonzero(np.diff(targets) != 1) + 1
        starts = [0, *cuts.tolist(), len(targets)]
        for start, stop in pairwise(starts):
            run = self.tensor.narrow(3, int(targets[start]), stop - start)
            run.copy_(gathered.narrow(3, start, stop - start))

    def trim(self, used: int) -> None:
        """Nothing: nobody else could use it."""

    def _allocate(self, capacity: int) -> None:
        self.tensor = self._make(capacity)
        self._flat = self.tensor.flatten(0, 1).unsqueeze(1)  # [2 L, 1, H, C, D]


class _InPlace:
    def __init__(self, flat: torch.Tensor, start: int, end: int) -> None:
        self._written = flat.narrow(3, start, end - start).unbind(0)
        self._read = flat.narrow(3, 0, end).unbind(0)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        self._written[2 * layer].copy_(key)
        self._written[2 * layer + 1].copy_(value)
        return self._read[2 * layer], self._read[2 * layer + 1]


class BlockPool:
    """The blocks that all requests of one stage share.

    Attributes:
        num_blocks, block_tokens: the budget.
        rows: [2 L, 1, H, allocated blocks * block_tokens, D]; grows by doubling, up to the budget.
        peak: most blocks in use at a time so far.
    """

    def __init__(self, *, spec: CacheSpec, num_blocks: int, block_tokens: int) -> None:
        """Sets the budget; memory is allocated as blocks are first used."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.peak = 0
        self._spec = spec
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: low numbers first
        self.rows = self._made(min(num_blocks, _FIRST_BLOCKS))

    @property
    def num_used(self) -> int:
        """Blocks in use."""
        return self.num_blocks - len(self._free)

    def take(self, num: int) -> list[int]:
        """Allocates blocks.

        Raises:
            RuntimeError: there are not so many; admission by blocks rules that out.
        """
        if num > len(self._free):
            raise RuntimeError(
                f"a request needs {num} more blocks, and {len(self._free)} of {self.num_blocks} are"
                " free: it holds more than it was admitted for"
            )
        taken = [self._free.pop() for _ in range(num)]
        self.peak = max(self.peak, self.num_used)
        self._cover(max(taken, default=-1) + 1)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Frees blocks."""
        if not blocks:
            return
        assert not set(blocks) & set(self._free), f"blocks {blocks} are freed twice"
        self._free.extend(blocks)

    def _cover(self, num: int) -> None:
        """Allocates memory for the first ``num`` blocks."""
        had = self.rows.shape[3] // self.block_tokens
        if num > had:
            old = self.rows
            self.rows = self._made(min(self.num_blocks, max(num, 2 * had)))
            self.rows[:, :, :, : old.shape[3]] = old

    def _made(self, num: int) -> torch.Tensor:
        return self._spec.empty(num * self.block_tokens).flatten(0, 1).unsqueeze(1)

    def unflatten(self, rows: torch.Tensor) -> torch.Tensor:
        """[L, 2, H, n, D] from [2 L, 1, H, n, D]."""
        return rows.squeeze(1).unflatten(0, (self._spec.num_layers, 2))


class Paged:
    """Blocks of a pool, found through the request's block table; they are taken as needed."""

    def __init__(self, *, pool: BlockPool) -> None:
        """Starts without any block."""
        self._pool = pool
        self._table: list[int] = []

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return len(self._table) * self._pool.block_tokens

    def reserve(self, end: int, used: int) -> None:
        """Takes the blocks that ``end`` slots need; nothing moves."""
        missing = -(-end // self._pool.block_tokens) - len(self._table)
        if missing > 0:
            self._table += self._pool.take(missing)

    def view(self, start: int, end: int) -> PassView:
        """Gathers what the pass reads, once for all layers."""
        return _Gathered(self._pool.rows, self._index(np.arange(end)), start)

    def held(self, num_slots: int) -> torch.Tensor:
        """[L, 2, H, n, D], a copy."""
        index = self._index(np.arange(num_slots))
        return self._pool.unflatten(self._pool.rows.index_select(3, index))

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """One gather and one scatter over all layers."""
        rows = self._pool.rows
        rows.index_copy_(3, self._index(targets), rows.index_select(3, self._index(sources)))

    def trim(self, used: int) -> None:
        """Gives the blocks beyond the first ``used`` slots back to the pool."""
        kept = -(-used // self._pool.block_tokens)
        self._pool.give_back(self._table[kept:])
        del self._table[kept:]

    def _index(self, slots: IntArray) -> torch.Tensor:
        """int64[n]: rows of the pool."""
        block, offset = np.divmod(slots, self._pool.block_tokens)
        rows = np.array(self._table, np.int64)[block] * self._pool.block_tokens + offset
        return to_device(rows, self._pool.rows.device)


class _Gathered:
    def __init__(self, rows: torch.Tensor, index: torch.Tensor, start: int) -> None:
        self._rows = rows.unbind(0)
        self._new = index[start:]
        self._start = start
        self._read = rows.index_select(3, index).unbind(0)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        for at, new in ((2 * layer, key), (2 * layer + 1, value)):
            self._rows[at].index_copy_(2, self._new, new)
            self._read[at][:, :, self._start :] = new
        return self._read[2 * layer], self._read[2 * layer + 1]
