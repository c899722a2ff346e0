"""Memory of key/value caches: one tensor per request, or blocks of a shared pool.

A cache addresses slots; its storage maps slots to memory. ``Contiguous`` storage is read in place.
``Paged`` storage (PagedAttention, Kwon et al. 2023; SpecPipe 4) maps slot ``s`` through a block
table to row ``table[s // block] * block + s % block`` of a pool that all requests of a stage share,
and gathers the rows that a pass reads.

Shape letters: L layers, G key/value heads, D head size, C capacity in slots, n slots in use, R rows
of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from specdec.device import to_device
from specdec.types import IntArray

_FIRST_BLOCKS = 64  # blocks that a new pool allocates
_LEAST_GROWTH = 128  # slots
_GROWTH = 1 / 32  # share of the capacity; small, because requests reserve what they need

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Shape, dtype and device of the caches of one runner (L: layers of its slice)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, num_slots: int) -> Tensor:
        """Returns an uninitialised tensor [L, 2, G, num_slots, D]."""
        shape = (self.num_layers, 2, self.num_kv_heads, num_slots, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


Store = Callable[[int, Tensor, Tensor], Pair]
"""(layer, key, value): writes the pass's rows [1, G, R, D], returns all slots [1, G, n, D]."""


Buffers = tuple[Tensor, Callable[[], None]]
"""Keys and values as ``layer_views`` of at least n slots, and a function to call after the pass."""


def _nothing() -> None:
    """Does what contiguous memory needs after a pass: nothing."""


class Contiguous:
    """One tensor [L, 2, G, C, D] per request, used in place; ``layers`` are its ``layer_views``."""

    def __init__(
        self, *, make: Callable[[int], Tensor], capacity: int, growth: float = _GROWTH
    ) -> None:
        """``make`` maps a number of slots to a tensor [L, 2, G, slots, D].

        Full memory grows by at least the share ``growth`` of its capacity.
        """
        self._make = make
        self._growth = growth
        self._allocate(capacity)

    def reserve(self, end: int, used: int) -> None:
        """Allocates room for ``end`` slots and some more if needed; keeps the first ``used``."""
        if end > self.capacity:
            old = self.tensor
            more = max(_LEAST_GROWTH, int(self._growth * self.capacity))
            self._allocate(max(end, self.capacity + more))
            self.tensor[:, :, :, :used] = old[:, :, :, :used]

    def writer(self, start: int, end: int) -> Store:
        """Returns access for a pass whose rows have the slots ``start`` .. ``end`` - 1."""
        written = self.layers.narrow(3, start, end - start).unbind(0)
        read = self.layers.narrow(3, 0, end).unbind(0)

        def store(layer: int, key: Tensor, value: Tensor) -> Pair:
            written[2 * layer].copy_(key)
            written[2 * layer + 1].copy_(value)
            return read[2 * layer], read[2 * layer + 1]

        return store

    def buffers(self, start: int, end: int) -> Buffers:
        """Returns memory for a pass that writes the slots ``start`` .. ``end`` - 1 itself."""
        return self.layers, _nothing

    def contents(self) -> Tensor:
        """Returns all slots, [L, 2, G, C, D]; read-only, because ``Paged`` returns a copy."""
        return self.tensor

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copies slots; every source is read before any target is written.

        One gather over all layers is followed by one write per range of adjacent targets.
        """
        index = to_device(sources, self.tensor.device)
        gathered = self.tensor.index_select(3, index)
        places = targets.tolist()
        cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
        for start, stop in pairwise([0, *cuts, len(places)]):
            run = self.tensor.narrow(3, places[start], stop - start)
            run.copy_(gathered.narrow(3, start, stop - start))

    def trim(self, used: int) -> None:
        """Does nothing: the slots beyond the first ``used`` cannot serve other requests."""

    def _allocate(self, capacity: int) -> None:
        self.tensor = self._make(capacity)
        self.layers = layer_views(self.tensor)
        self.capacity: int = self.tensor.shape[3]


def layer_views(tensor: Tensor) -> Tensor:
    """Views [L, 2, G, C, D] as [2 L, 1, G, C, D]: per layer its keys, then its values."""
    return rearrange(tensor, "l kv g c d -> (l kv) 1 g c d")


class BlockPool:
    """A pool of blocks of ``block_tokens`` slots each, shared by all requests of one stage.

    ``peak`` is the largest number of blocks that were in use at the same time so far.
    """

    def __init__(self, *, spec: CacheSpec, num_blocks: int, block_tokens: int) -> None:
        """Sets the maximum; memory is allocated as blocks are first used."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.peak = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low numbers first
        most = num_blocks * block_tokens
        self._memory = Contiguous(
            make=lambda slots: spec.empty(min(slots, most)),
            capacity=_FIRST_BLOCKS * block_tokens,
            growth=1.0,
        )

    @property
    def rows(self) -> Tensor:
        """Returns the memory, [2 L, 1, G, allocated slots, D], which doubles when it is full."""
        return self._memory.layers

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, num: int) -> list[int]:
        """Allocates blocks; a RuntimeError means that admission control allowed too many."""
        if num > len(self._free):
            raise RuntimeError(
                f"a request needs {num} more blocks, but only {len(self._free)} of"
                f" {self.num_blocks} are free: it exceeds the number it was admitted with"
            )
        blocks = [self._free.pop() for _ in range(num)]
        self.peak = max(self.peak, self.num_used)
        end = (max(blocks, default=-1) + 1) * self.block_tokens
        self._memory.reserve(end, self._memory.capacity)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return  # the common case, once per step
        assert not set(blocks) & set(self._free), f"blocks {blocks} are freed twice"
        self._free.extend(blocks)


class Paged:
    """Blocks of a pool, addressed by the request's block table; methods as in ``Contiguous``."""

    def __init__(self, *, pool: BlockPool) -> None:
        self._pool = pool
        self._table: list[int] = []

    @property
    def capacity(self) -> int:
        return len(self._table) * self._pool.block_tokens

    def reserve(self, end: int, used: int) -> None:
        """Allocates the blocks that ``end`` slots need; unlike ``Contiguous`` it moves no data."""
        missing = -(-end // self._pool.block_tokens) - len(self._table)
        if missing > 0:
            self._table += self._pool.take(missing)

    def writer(self, start: int, end: int) -> Store:
        """Gathers the slots that the pass reads, once for all layers."""
        index = self._index(np.arange(end))
        new, written = index[start:], self._pool.rows.unbind(0)
        read = self._pool.rows.index_select(3, index).unbind(0)

        def store(layer: int, key: Tensor, value: Tensor) -> Pair:
            for at, rows in ((2 * layer, key), (2 * layer + 1, value)):
                written[at].index_copy_(2, new, rows)
                read[at][:, :, start:] = rows
            return read[2 * layer], read[2 * layer + 1]

        return store

    def buffers(self, start: int, end: int) -> Buffers:
        """Returns a copy of the slots; the new ones are written back after the pass."""
        index = self._index(np.arange(end))
        copy = self._pool.rows.index_select(3, index)

        def write_back() -> None:
            self._pool.rows.index_copy_(3, index[start:], copy[..., start:, :])

        return copy, write_back

    def contents(self) -> Tensor:
        rows = self._pool.rows.index_select(3, self._index(np.arange(self.capacity)))
        return rearrange(rows, "(l kv) 1 g n d -> l kv g n d", kv=2)

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        rows = self._pool.rows
        rows.index_copy_(3, self._index(targets), rows.index_select(3, self._index(sources)))

    def trim(self, used: int) -> None:
        """Returns the blocks beyond the first ``used`` slots to the pool."""
        kept = -(-used // self._pool.block_tokens)
        self._pool.give_back(self._table[kept:])
        del self._table[kept:]

    def _index(self, slots: IntArray) -> Tensor:
        """Returns the rows of the pool, int64[n], that store ``slots``."""
        block, offset = np.divmod(slots, self._pool.block_tokens)
        rows = np.array(self._table, np.int64)[block] * self._pool.block_tokens + offset
        return to_device(rows, self._pool.rows.device)


Storage: TypeAlias = Contiguous | Paged
