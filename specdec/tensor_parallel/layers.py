"""Sharded linear layers that replace transformers' own.

Shape letters: R rows, I inputs, O outputs, P ranks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, pad

from specdec.tensor_parallel.collective import Collective
from specdec.tensor_parallel.cuts import Piece


class ColumnLinear(nn.Module):
    """A share of a layer's outputs: [R, I] -> [R, share], or [R, O] if shares are gathered."""

    def __init__(self, *, transposed: bool, gathered: tuple[Collective, int] | None = None) -> None:
        """Creates the layer without weights, which ``sharding`` assigns.

        Args:
            transposed: whether the weight has shape [I, share] (GPT-2's layers).
            gathered: (group, O) if every rank needs all outputs; None: no gather. Shares are padded
                at the end of the last ranks, so the first O outputs are the layer's.
        """
        super().__init__()
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.transposed = transposed
        self.gathered = gathered

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the share's outputs, or all outputs if gathered."""
        weight = self.weight.T if self.transposed else self.weight
        output = linear(hidden, weight, self.bias)
        if self.gathered is None:
            return output
        group, total = self.gathered
        return group.gather(output)[..., :total]


class RowLinear(nn.Module):
    """A share of a layer's inputs: [R, share] -> [R, O], summed over the group, plus bias."""

    def __init__(self, *, transposed: bool, group: Collective, split: Piece | None = None) -> None:
        """Creates the layer without weights, which ``sharding`` assigns.

        Args:
            transposed: whether the weight has shape [share, O].
            group: sums the outputs.
            split: the share of the inputs, if every rank receives all inputs; None: inputs are
                sharded already.
        """
        super().__init__()
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.transposed = transposed
        self.group = group
        self.split = split

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the whole layer's outputs, equal on every rank."""
        if self.split is not None:
            hidden = hidden[..., self.split.start : self.split.stop]
            hidden = pad(hidden, (0, self.split.pad)) if self.split.pad else hidden
        weight = self.weight.T if self.transposed else self.weight
        output = self.group.add(linear(hidden, weight))
        return output if self.bias is None else output + self.bias
