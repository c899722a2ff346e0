"""What a parameter keeps in memory."""

from __future__ import annotations

from torch import Tensor


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that a quantised weight consists of; a plain one itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in stored_parts(getattr(tensor, name))]
