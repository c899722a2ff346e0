"""Modules of exact passes whose elementary functions give an element the same bits anywhere.

Activations and soft caps run in pieces (``specdec.attention.exact.in_pieces`` says why), rotary
tables are computed for always the same number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdec.attention.exact import in_pieces
from specdec.kernels.graphs import ROW_COUNTS

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


class _Activation(nn.Module):
    """An activation in pieces."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return in_pieces(self._inner, hidden)


class _Rotary(nn.Module):
    """A rotary embedding whose tables are computed for the largest number of rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, hidden: Tensor, position_ids: Tensor, *args: Any) -> tuple[Tensor, ...]:
        num_rows = position_ids.shape[1]
        padded = pad(position_ids, (0, max(0, ROW_COUNTS[-1] - num_rows)))
        tables: tuple[Tensor, ...] = self._inner(hidden, padded, *args)
        return tuple(table[:, :num_rows] for table in tables)


class _CappedOutput(nn.Module):
    """An output head with the soft cap of its logits."""

    def __init__(self, inner: nn.Module, softcap: float) -> None:
        super().__init__()
        self.weight = inner.weight
        self._inner = inner
        self._softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        capped: Tensor = in_pieces(torch.tanh, self._inner(hidden) / self._softcap)
        return capped * self._softcap


def use_exact_modules(model: Any) -> None:
    """Replaces activations, rotary embeddings and the soft cap of logits.

    Args:
        model: a runner's own copy.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, _Rotary(child))
            elif type(child).__module__ in _ACTIVATIONS:
                setattr(parent, name, _Activation(child))
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap:
        config.final_logit_softcapping = None
        for name, child in list(model.named_children()):
            if child is model.get_output_embeddings():
                setattr(model, name, _CappedOutput(child, softcap))
