"""Fixed buffers of captured passes: key/value arenas and the inputs of a pass.

Shape letters: L layers, G key/value heads, D head size, C slots of an arena (without its spare), R
padded rows, M columns of the mask, E hidden size.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import CacheSpec, Contiguous, layer_views

LEAST_CONTEXT = 64
"""Slots of the smallest arena, and of the smallest context (a power of two) of a captured pass."""


class Arena:
    """Key/value memory at a fixed address, used by one request at a time.

    Attributes:
        slots: [L, 2, G, C, D], for the cache.
        layers: [2 L, 1, G, C + 1, D], the same memory with the spare slot.
        spare: index of the spare slot, C.
    """

    def __init__(self, spec: CacheSpec, capacity: int) -> None:
        """Allocates zeros: masked slots must be finite, because 0 * NaN is NaN."""
        shape = (spec.num_layers, 2, spec.num_kv_heads, capacity + 1, spec.head_dim)
        storage = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self.slots = storage.narrow(3, 0, capacity)
        self.layers = layer_views(storage)
        self.spare = capacity


class Arenas:
    """Assigns arenas to caches and reuses them when a cache is garbage-collected."""

    def __init__(self, spec: CacheSpec) -> None:
        """Allocates none yet."""
        self._spec = spec
        self._free: dict[int, list[Arena]] = {}
        self._assigned: weakref.WeakKeyDictionary[TreeCache, list[Arena]]
        self._assigned = weakref.WeakKeyDictionary()

    def new_cache(self, capacity: int) -> TreeCache:
        """Returns a cache in an arena; it moves to a larger arena when it outgrows its own."""
        current: list[Arena] = []  # at most one; shared with the finalizer, unlike an attribute
        storage = Contiguous(make=lambda size: self._assign(current, size).slots, capacity=capacity)
        cache = TreeCache(spec=self._spec, capacity=capacity, storage=storage)
        self._assigned[cache] = current
        weakref.finalize(cache, self._release, current)
        return cache

    def of(self, cache: TreeCache) -> Arena | None:
        """Returns the arena of ``cache``; None if it has none."""
        current = self._assigned.get(cache)
        return current[0] if current else None

    def _assign(self, current: list[Arena], size: int) -> Arena:
        """Replaces the current arena by one of at least ``size`` slots."""
        # Few sizes, so that later requests can reuse arenas and the graphs captured over them; a
        # larger arena that is free has graphs already, a new one of the right size has none.
        capacity = max(LEAST_CONTEXT, 1 << (size - 1).bit_length())
        fits = [free for free, arenas in self._free.items() if arenas and free >= capacity]
        arena = self._free[min(fits)].pop() if fits else Arena(self._spec, capacity)
        self._release(current)
        current.append(arena)
        return arena

    def _release(self, current: list[Arena]) -> None:
        while current:
            arena = current.pop()
            self._free.setdefault(arena.spare, []).append(arena)


class Inputs:
    """Inputs of a pass in one device buffer, filled by one copy.

    Attributes:
        tokens, positions, slots: int64[R].
        lengths: int64[2], see ``Visibility``.
        columns: int64[M], absolute positions of the entries in the slots from ``lengths[0]`` on.
        visible: uint8[R, M], see ``Visibility``.
        hidden: [1, R, E] for a slice that is not the first; else None.
    """

    def __init__(
        self, num_rows: int, num_columns: int, spec: CacheSpec, hidden_size: int | None
    ) -> None:
        """Allocates the buffers; ``hidden_size``: E, None for the first slice."""
        sizes = [num_rows, num_rows, num_rows, 2, num_columns]
        ends, shape = np.cumsum(sizes), (num_rows, num_columns)
        self._host = np.zeros(8 * ends[-1] + num_rows * num_columns, np.uint8)
        self._ints = np.split(self._host[: 8 * ends[-1]].view(np.int64), ends[:-1])
        self._visible = self._host[8 * ends[-1] :].reshape(shape)
        self._device = torch.zeros(len(self._host), dtype=torch.uint8, device=spec.device)
        ints, visible = self._device.tensor_split([8 * int(ends[-1])])
        self.tokens, self.positions, self.slots, self.lengths, self.columns = ints.view(
            torch.int64
        ).split(sizes)
        self.visible = visible.view(shape)
        self.hidden: Tensor | None = None
        if hidden_size is not None:
            size = (1, num_rows, hidden_size)
            self.hidden = torch.zeros(size, dtype=spec.dtype, device=spec.device)

    def idle(self, spare: int) -> None:
        """Inputs of a pass that changes no cache: rows at the spare slot, which see slot 0."""
        tokens, positions, slots, lengths, columns = self._ints
        tokens[:], positions[:], slots[:], columns[:] = 0, 0, spare, 0
        lengths[:] = 1, 1
        self._visible[:] = 0
        self._device.copy_(torch.from_numpy(self._host), non_blocking=True)
        if self.hidden is not None:
            self.hidden.zero_()

    def fill(self, rows: Rows, spare: int, hidden: Tensor | None) -> None:
        """Pads the rows and copies them to the device; ``hidden``: [rows, E] or None."""
        tokens, positions, slots, lengths, columns = self._ints
        num, num_seen = len(rows), rows.visible.shape[1]
        tokens[:num], tokens[num:] = rows.tokens, rows.tokens[-1]
        positions[:num], positions[num:] = rows.positions, rows.positions[-1]
        slots[:num], slots[num:] = np.arange(rows.start, rows.end), spare
        lengths[:] = rows.first_masked, rows.end
        columns[:num_seen] = rows.cache.key_positions(rows.end)[rows.first_masked :]
        self._visible[:num, :num_seen] = rows.visible
        self._visible[:num, num_seen:] = 0
        self._visible[num:] = self._visible[num - 1]
        # Pageable memory is staged before the call returns, so the buffer may be reused at once.
        self._device.copy_(torch.from_numpy(self._host), non_blocking=True)
        if self.hidden is not None:
            assert hidden is not None, "hidden states enter every slice but the first"
            self.hidden[0, :num] = hidden
            self.hidden[0, num:] = hidden[-1]
