"""Shares of linear layers that stand in the places of transformers' own.

Letters: R rows, I inputs, O outputs, P ranks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, pad

from specdec.tensor_parallel.collective import Collective
from specdec.tensor_parallel.cuts import Piece


class ColumnLinear(nn.Module):
    """Some of a layer's outputs: [R, I] -> [R, share], or [R, O] where shares are gathered."""

    def __init__(self, *, transposed: bool, gathered: tuple[Collective, int] | None = None) -> None:
        """Without weights, which ``sharding`` puts in.

        Args:
            transposed: whether the weight stands as [I, share] (GPT-2's layers).
            gathered: the group and O, where every rank needs all outputs. Shares are padded at the
                end of the last ones, so the first O outputs are the layer's own and a padded output
                (a zero logit, say) is never seen.
        """
        super().__init__()
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.transposed = transposed
        self.gathered = gathered

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The share's outputs, or all of them."""
        weight = self.weight.T if self.transposed else self.weight
        output = linear(hidden, weight, self.bias)
        if self.gathered is None:
            return output
        group, total = self.gathered
        return group.gather(output)[..., :total]


class RowLinear(nn.Module):
    """Some of a layer's inputs: [R, share] -> [R, O], summed over the group, then the bias."""

    def __init__(self, *, transposed: bool, group: Collective, split: Piece | None = None) -> None:
        """Without weights, which ``sharding`` puts in.

        Args:
            transposed: whether the weight stands as [share, O].
            group: adds up.
            split: the share of the inputs to take, where every rank is given all of them.
        """
        super().__init__()
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.transposed = transposed
        self.group = group
        self.split = split

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The whole layer's outputs, the same on every rank."""
        if self.split is not None:
            hidden = hidden[..., self.split.start : self.split.stop]
            hidden = pad(hidden, (0, self.split.pad)) if self.split.pad else hidden
        weight = self.weight.T if self.transposed else self.weight
        output = self.group.add(linear(hidden, weight))
        return output if self.bias is None else output + self.bias
