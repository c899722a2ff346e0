"""Fixed buffers for captured passes: where caches lie, and what a pass reads.

Letters: L layers, G key/value heads, D head size, C slots of an arena (and one spare), R padded
rows, M columns of the mask, E hidden size.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import CacheSpec, Contiguous

LEAST_CONTEXT = 64
"""Slots of the smallest arena; graphs that attend densely look at powers of two from here on."""

_BITS = 8


class Arena:
    """Storage of one request at a time, at a fixed address.

    Attributes:
        slots: [L, 2, G, C, D], what a cache is given.
        flat: [2 L, 1, G, C + 1, D], the spare slot included.
        spare: number of the spare slot.
    """

    def __init__(self, spec: CacheSpec, capacity: int) -> None:
        """Allocates zeros: masked entries must be finite, since 0 times NaN is not 0."""
        shape = (spec.num_layers, 2, spec.num_kv_heads, capacity + 1, spec.head_dim)
        storage = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self.slots = storage.narrow(3, 0, capacity)
        self.flat = storage.flatten(0, 1).unsqueeze(1)
        self.spare = capacity


class Arenas:
    """Hands out arenas to caches and takes them back when a cache is gone."""

    def __init__(self, spec: CacheSpec) -> None:
        """Starts without any."""
        self._spec = spec
        self._free: dict[int, list[Arena]] = {}
        self._leased: weakref.WeakKeyDictionary[TreeCache, list[Arena]] = (
            weakref.WeakKeyDictionary()
        )

    def new_cache(self, capacity: int) -> TreeCache:
        """A cache in an arena; it moves to a larger one where it outgrows its own."""
        held: list[Arena] = []
        storage = Contiguous(make=lambda size: self._lease(held, size).slots, capacity=capacity)
        cache = TreeCache(spec=self._spec, capacity=capacity, storage=storage)
        self._leased[cache] = held
        weakref.finalize(cache, self._give_back, held)
        return cache

    def of(self, cache: TreeCache) -> Arena | None:
        """The arena that ``cache`` lies in, if any."""
        held = self._leased.get(cache)
        return held[0] if held else None

    def _lease(self, held: list[Arena], size: int) -> Arena:
        # Few sizes, so that arenas (and the graphs over them) fit the next request.
        capacity = max(LEAST_CONTEXT, 1 << (size - 1).bit_length())
        free = self._free.setdefault(capacity, [])
        arena = free.pop() if free else Arena(self._spec, capacity)
        self._give_back(held)
        held.append(arena)
        return arena

    def _give_back(self, held: list[Arena]) -> None:
        while held:
            arena = held.pop()
            self._free.setdefault(arena.spare, []).append(arena)


class Inputs:
    """What a pass reads, in one stretch of device memory, filled by one copy.

    Attributes:
        tokens, positions, slots: int64[R].
        lengths: int64[2], see ``Seen``.
        columns: int64[M], positions of what the slots from ``lengths[0]`` on hold.
        bits: uint8[R, M / 8].
        hidden: [1, R, E], for a slice that is not the first.
    """

    def __init__(
        self, num_rows: int, num_columns: int, device: torch.device, hidden: torch.Tensor | None
    ) -> None:
        """Allocates; ``hidden``: as in the class."""
        num_ints, num_bytes = 3 * num_rows + 2 + num_columns, num_rows * num_columns // _BITS
        self._host = np.zeros(8 * num_ints + num_bytes, np.uint8)
        self._device = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        ints, self.bits = self._device.split([8 * num_ints, num_bytes])
        self.bits = self.bits.view(num_rows, -1)
        sizes = [num_rows, num_rows, num_rows, 2, num_columns]
        self.tokens, self.positions, self.slots, self.lengths, self.columns = ints.view(
            torch.int64
        ).split(sizes)
        host = self._host[: 8 * num_ints].view(np.int64)
        self._ints = np.split(host, np.cumsum(sizes)[:-1])
        self._bits = self._host[8 * num_ints :].reshape(num_rows, -1)
        self._visible = np.zeros((num_rows, num_columns), np.bool_)
        self.hidden = hidden

    def fill(self, rows: Rows, spare: int, hidden: torch.Tensor | None) -> None:
        """Pads the rows and sends them to the device; ``hidden``: [rows, E]."""
        tokens, positions, slots, lengths, columns = self._ints
        num, seen = len(rows), rows.visible.shape[1]
        tokens[:num], tokens[num:] = rows.tokens, rows.tokens[-1]
        positions[:num], positions[num:] = rows.positions, rows.positions[-1]
        slots[:num], slots[num:] = np.arange(rows.start, rows.end), spare
        lengths[:] = rows.first_masked, rows.end
        columns[:seen] = rows.cache.key_positions(rows.end)[rows.first_masked :]
        self._visible[:num, :seen] = rows.visible
        self._visible[:num, seen:] = False
        self._visible[num:] = self._visible[num - 1]
        self._bits[:] = np.packbits(self._visible, axis=1, bitorder="little")
        # From pageable memory, which is staged before the call returns: no buffer to wait for.
        self._device.copy_(torch.from_numpy(self._host), non_blocking=True)
        if self.hidden is not None:
            assert hidden is not None, "hidden states enter every slice but the first"
            self.hidden[0, :num] = hidden
            self.hidden[0, num:] = hidden[-1]

    def visible(self) -> torch.Tensor:
        """uint8[R, M] from the bits."""
        shifts = torch.arange(_BITS, dtype=torch.uint8, device=self.bits.device)
        return ((self.bits.unsqueeze(-1) >> shifts) & 1).flatten(1)
