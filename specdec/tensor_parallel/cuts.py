"""One rank's share of a weight: ranges along one dimension, each padded with zeros.

Shape letters: H query heads, G key/value heads, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    start: int
    stop: int
    pad: int

    def times(self, unit: int) -> Piece:
        return Piece(self.start * unit, self.stop * unit, self.pad * unit)


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's share of a weight: the index ranges ``pieces`` of dimension ``dim``, joined."""

    dim: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(p.stop - p.start + p.pad for p in self.pieces)

    def shape(self, full: Sequence[int]) -> tuple[int, ...]:
        return (*full[: self.dim], self.size, *full[self.dim + 1 :])

    def of(self, full: Any, dtype: torch.dtype) -> Tensor:
        """Returns this share of ``full``, a tensor or safetensors slice; may be a view of it."""
        shape = tuple(full.get_shape() if hasattr(full, "get_shape") else full.shape)
        if len(self.pieces) == 1 and not self.pieces[0].pad:
            return torch.as_tensor(self._read(full, self.pieces[0])).to(dtype)
        share = torch.zeros(self.shape(shape), dtype=dtype)
        if isinstance(full, Tensor):
            share = share.to(full.device)
        offset = 0
        for piece in self.pieces:
            width = piece.stop - piece.start
            if width:
                share.narrow(self.dim, offset, width).copy_(self._read(full, piece))
            offset += width + piece.pad
        return share

    def _read(self, full: Any, piece: Piece) -> Tensor:
        entries = slice(piece.start, piece.stop)
        return full[entries] if self.dim == 0 else full[:, entries]


def even(total: int, *, rank: int, size: int) -> Piece:
    """Returns a rank's piece of ``total`` entries, split evenly over ``size`` ranks and padded."""
    width = -(-total // size)
    start, stop = min(rank * width, total), min((rank + 1) * width, total)
    return Piece(start, stop, width - (stop - start))


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The attention heads of one rank: pieces of query heads and of key/value heads, counted in
    heads. ``group_size`` is the rank's number of query heads per key/value head.

    Each group (a key/value head and its query heads) is split into the number of parts that leaves
    a rank the fewest heads; every part has a copy of the key/value head. Ranks get equally many
    parts, in order; groups of zeros pad the last ranks (SwiftSpec section 4), and their output
    projection adds nothing. For 64 heads in 8 groups on 6 ranks, a rank has 11 heads in
    SwiftSpec, which pads query heads alone, but 12 heads and 3 key/value heads in this split.
    """

    query: tuple[Piece, ...]
    key_value: tuple[Piece, ...]
    group_size: int

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, *, rank: int, size: int) -> HeadSplit:
        per_group = num_heads // num_kv_heads

        def num_held(parts: int) -> int:
            return -(-num_kv_heads * parts // size) * (-(-per_group // parts) + 1)

        parts = min(range(1, per_group + 1), key=num_held)
        width = -(-per_group // parts)
        per_rank = -(-num_kv_heads * parts // size)
        query, key_value = [], []
        for number in range(rank * per_rank, (rank + 1) * per_rank):
            group, part = divmod(number, parts)
            if group >= num_kv_heads:
                query.append(Piece(0, 0, width))
                key_value.append(Piece(0, 0, 1))
                continue
            first = group * per_group + min(part * width, per_group)
            last = group * per_group + min((part + 1) * width, per_group)
            query.append(Piece(first, last, width - (last - first)))
            key_value.append(Piece(group, group + 1, 0))
        return HeadSplit(tuple(query), tuple(key_value), width)
