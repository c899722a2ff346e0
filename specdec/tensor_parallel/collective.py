"""Collective operations of a tensor-parallel group: sums and gathers of activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


class Collective:
    """One rank of a group; subclasses implement the communication.

    Attributes:
        rank: rank within the group, from 0.
        size: number of ranks.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        """Stores rank and size.

        Raises:
            ValueError: unless 0 <= rank < size.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in a group of {size}")
        self.rank = rank
        self.size = size
        self._paused = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Collective:
        """Returns the same object, so that copies of a model's modules stay in the group."""
        return self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disables communication inside the block: shapes are right, values are not."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def add(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all ranks in the type of ``tensor``; 16-bit types sum in float32."""
        if self._paused or self.size == 1:
            return tensor
        if tensor.dtype in _HALF:
            return self._add(tensor.float()).to(tensor.dtype)
        return self._add(tensor.contiguous())

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenates every rank's [..., n] to [..., size * n], in rank order."""
        if self.size == 1:
            return tensor
        parts = [tensor] * self.size if self._paused else self._gather(tensor.contiguous())
        return torch.cat(list(parts), -1)  # einops would stack and copy once more

    def _add(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def _gather(self, tensor: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError


class InRankOrder(Collective):
    """A group whose sums add the ranks' parts in the order of ranks.

    A ring adds each part of a tensor in another order, so that an element's last bit depends on
    its place in the tensor, that is on the number of rows.
    """

    def __init__(self, group: Collective) -> None:
        """Communicates through ``group``."""
        super().__init__(rank=group.rank, size=group.size)
        self._inner = group

    def _add(self, tensor: Tensor) -> Tensor:
        parts = self._gather(tensor)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _gather(self, tensor: Tensor) -> Sequence[Tensor]:
        return self._inner.gather(tensor).chunk(self.size, -1)
