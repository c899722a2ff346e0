"""Collective operations of a tensor-parallel group: sums and gathers of activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

ONE_EXCHANGE_BYTES = 64 * 1024
"""With more than two ranks, tensors above this size are summed in two exchanges instead of one."""

_HALF = (torch.float16, torch.bfloat16)


class Collective:
    def __init__(self, *, rank: int, size: int) -> None:
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
        """Disables communication in a ``with`` block: results have right shapes, wrong values."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def add(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all ranks, in the dtype of ``tensor``.

        The ranks' tensors are sent in their own dtype and added in rank order (16-bit ones in
        float32, rounded once), so every rank gets the same bits, whatever an element's index and
        the number of rows. Small tensors are sent whole to every rank; of large ones, each rank
        sums a slice, which gives the same bits.
        """
        if self._paused or self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        if self.size == 2 or tensor.numel() * tensor.element_size() <= ONE_EXCHANGE_BYTES:
            return _sum(self._gather(tensor))
        slices = pad(tensor.flatten(), (0, -tensor.numel() % self.size)).view(self.size, -1)
        total = _sum(self._exchange(slices).unbind())
        return torch.cat(list(self._gather(total)))[: tensor.numel()].view_as(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor
        parts = [tensor] * self.size if self._paused else self._gather(tensor.contiguous())
        return torch.cat(list(parts), -1)  # einops would stack and copy once more

    def _gather(self, tensor: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError

    def _exchange(self, slices: Tensor) -> Tensor:
        raise NotImplementedError


def _sum(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    # torch.sum chooses the order of its terms by the tensor's shape, so its last bits vary.
    total = (first.float() if first.dtype in _HALF else first) + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(first.dtype)
