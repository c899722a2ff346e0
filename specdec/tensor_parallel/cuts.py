"""Shards of a weight: ranges along one dimension, each padded with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries ``start .. stop - 1`` followed by ``pad`` zeros."""

    start: int
    stop: int
    pad: int

    def times(self, unit: int) -> Piece:
        """Returns the piece in units that are ``unit`` entries wide, such as heads."""
        return Piece(self.start * unit, self.stop * unit, self.pad * unit)


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's share of a weight.

    Attributes:
        dim: the dimension that is cut, 0 or 1.
        pieces: the share's pieces in order.
    """

    dim: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Size of the share along ``dim``, including zeros."""
        return sum(p.stop - p.start + p.pad for p in self.pieces)

    def shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the share of a weight with shape ``full``."""
        return (*full[: self.dim], self.size, *full[self.dim + 1 :])

    def of(self, full: Any, dtype: torch.dtype) -> torch.Tensor:
        """Returns the share of a tensor, or of a slice of a safetensors file.

        Of a file only the share is read. The result may be a view of ``full``.
        """
        shape = tuple(full.get_shape() if hasattr(full, "get_shape") else full.shape)
        if len(self.pieces) == 1 and not self.pieces[0].pad:
            return torch.as_tensor(self._read(full, self.pieces[0])).to(dtype)
        share = torch.zeros(self.shape(shape), dtype=dtype)
        if isinstance(full, torch.Tensor):
            share = share.to(full.device)
        offset = 0
        for piece in self.pieces:
            width = piece.stop - piece.start
            if width:
                share.narrow(self.dim, offset, width).copy_(self._read(full, piece))
            offset += width + piece.pad
        return share

    def _read(self, full: Any, piece: Piece) -> torch.Tensor:
        entries = slice(piece.start, piece.stop)
        return full[entries] if self.dim == 0 else full[:, entries]


def even(total: int, *, rank: int, size: int) -> Piece:
    """Splits ``total`` entries evenly; the shares of the last ranks are padded."""
    width = -(-total // size)
    start, stop = min(rank * width, total), min((rank + 1) * width, total)
    return Piece(start, stop, width - (stop - start))
