"""What the ranks of a tensor-parallel group do together: sums and gathers of activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)


class Collective:
    """One rank's place in its group; subclasses say how tensors meet.

    Attributes:
        rank: place in the group, from 0.
        size: degree of the group.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        """Takes a place.

        Raises:
            ValueError: for a place that the group has not.
        """
        if not 0 <= rank < size:
            raise ValueError(f"no place {rank} in a group of {size}")
        self.rank = rank
        self.size = size
        self._paused = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Collective:
        """Itself: copies of a model's modules stay in the group."""
        return self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the others out: shapes are right, values are not (for a model's first probe)."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in the type of ``tensor`` (half types add up in float32)."""
        if self._paused or self.size == 1:
            return tensor
        if tensor.dtype in _HALF:
            return self._add(tensor.float()).to(tensor.dtype)
        return self._add(tensor.contiguous())

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., size * n]: every rank's [..., n], in order of rank."""
        if self.size == 1:
            return tensor
        parts = [tensor] * self.size if self._paused else self._gather(tensor.contiguous())
        return torch.cat(list(parts), -1)

    def _add(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        raise NotImplementedError
