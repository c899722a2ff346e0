"""Shares of a weight: ranges of one dimension, in order, each followed by zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries ``start .. stop - 1`` and then ``pad`` zeros."""

    start: int
    stop: int
    pad: int

    def times(self, unit: int) -> Piece:
        """The same of entries that are ``unit`` wide."""
        return Piece(self.start * unit, self.stop * unit, self.pad * unit)


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's share of a weight.

    Attributes:
        dim: 0 or 1, what is cut.
        pieces: in the order in which they stand in the share.
    """

    dim: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Entries of the share along ``dim``, zeros included."""
        return sum(p.stop - p.start + p.pad for p in self.pieces)

    def shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """Shape of the share of a weight of shape ``full``."""
        return (*full[: self.dim], self.size, *full[self.dim + 1 :])

    def of(self, full: Any, dtype: torch.dtype) -> torch.Tensor:
        """The share of a tensor, or of a slice of a safetensors file, of which it reads no more.

        A share without zeros of a tensor of the right type is a view of it where that can be.
        """
        shape = tuple(full.get_shape() if hasattr(full, "get_shape") else full.shape)
        if len(self.pieces) == 1 and not self.pieces[0].pad:
            return torch.as_tensor(self._read(full, self.pieces[0])).to(dtype)
        share = torch.zeros(self.shape(shape), dtype=dtype)
        if isinstance(full, torch.Tensor):
            share = share.to(full.device)
        at = 0
        for piece in self.pieces:
            width = piece.stop - piece.start
            if width:
                share.narrow(self.dim, at, width).copy_(self._read(full, piece))
            at += width + piece.pad
        return share

    def _read(self, full: Any, piece: Piece) -> torch.Tensor:
        return (
            full[piece.start : piece.stop] if self.dim == 0 else full[:, piece.start : piece.stop]
        )


def even(total: int, *, rank: int, size: int) -> Piece:
    """The share of one of ``size`` ranks in ``total`` entries; the last ones are padded."""
    width = -(-total // size)
    start, stop = min(rank * width, total), min((rank + 1) * width, total)
    return Piece(start, stop, width - (stop - start))
