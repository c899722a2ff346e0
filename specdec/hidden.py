"""Hidden states of the target on their way to a part that needs them.

A layer's number counts from 0, and its hidden state is the residual stream after it: that of the
last layer is what the final norm reads.

Shape letters: T prompt tokens of a chunk, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHidden:
    """Hidden states of a prefill chunk that has passed the target.

    Attributes:
        request: request id.
        start: position of the chunk's first token.
        layers: layer -> [T, E], in the target's dtype on its device.
    """

    request: int
    start: int
    layers: Mapping[int, torch.Tensor]

    @property
    def last_position(self) -> int:
        """Position of the last row."""
        return self.start + len(next(iter(self.layers.values()))) - 1
