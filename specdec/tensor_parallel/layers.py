"""Sharded linear layers that replace those of transformers.

Shape letters: R rows, I inputs, O outputs, P ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from specdec.tensor_parallel.collective import Collective
from specdec.tensor_parallel.cuts import Cut, Piece

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class _Share(nn.Module):
    """One rank's share of a linear layer; sharded parameters are meta tensors until assigned."""

    def __init__(self, module: Any, cuts: Mapping[str, Cut]) -> None:
        """Takes over hooks of ``module`` and parameters whose name is not in ``cuts``, which has
        this rank's share of the others. Weights stored as [I, O] (GPT-2) keep this order.
        """
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor | None
        self.transposed = not isinstance(module, nn.Linear)
        for name, whole in (("weight", module.weight), ("bias", module.bias)):
            parameter = whole
            if whole is not None and name in cuts:
                empty = torch.empty(cuts[name].shape(whole.shape), dtype=whole.dtype, device="meta")
                parameter = nn.Parameter(empty, requires_grad=False)
            self.register_parameter(name, parameter)
        for name in _HOOKS:
            setattr(self, name, getattr(module, name))

    def _product(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return linear(hidden, self.weight.T if self.transposed else self.weight, bias)


class ColumnLinear(_Share):
    """Computes one rank's share of outputs, [R, I] -> [R, share]; all, [R, O], if ``gathered``."""

    gathered: tuple[Collective, int] | None = None
    """(group, O) if every rank needs all outputs, else None. Padding is at the end of the last
    ranks' shares, so the first O gathered outputs are the layer's.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        output = self._product(hidden, self.bias)
        if self.gathered is None:
            return output
        group, total = self.gathered
        return group.gather(output)[..., :total]


class RowLinear(_Share):
    """Multiplies one rank's share of inputs, [R, share], sums over the group, adds bias: [R, O]."""

    group: Collective
    split: Piece | None = None
    """This rank's range of inputs if every rank receives all of them; None if they come sharded."""

    def forward(self, hidden: Tensor) -> Tensor:
        if self.split is not None:
            hidden = hidden[..., self.split.start : self.split.stop]
            hidden = pad(hidden, (0, self.split.pad)) if self.split.pad else hidden
        output = self.group.add(self._product(hidden, None))
        return output if self.bias is None else output + self.bias
