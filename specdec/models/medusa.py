"""Medusa heads: the tokens after the next one, from one hidden state of the target.

Medusa, arXiv 2401.10774, section 2.1. With h the last hidden state at position t, the target's own
head predicts token t + 1, and head k (k = 1 .. K) token t + 1 + k:

    softmax(W2_k (SiLU(W1_k h) + h))

Here h is what the target's layers give, behind a norm of the head's own that begins as the target's
final norm; W1 is ``block``, W2 ``output``.

Shape letters: R rows, E hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models.exits import final_norm, read_tensors

Weights = Mapping[str, torch.Tensor]
"""A head's weights by name: norm.weight, block.weight, output.weight, each absent where it is the
target's own (norm, output) or zero (block)."""


class MedusaHeads:
    """K heads on the hidden states after the target's last layer.

    Attributes:
        num_heads: K.
        layer: the target's last layer, from 0, whose output they read.
        vocab_size: V.
        head_bytes: bytes of weights that a pass of one head reads, on average.
    """

    def __init__(self, *, target: PreTrainedModel, heads: Sequence[Weights], meter: Meter) -> None:
        """Puts the weights into modules; the target's own are shared and not changed.

        Args:
            target: whose device and dtype they take.
            heads: the first predicts the token after the next one.
            meter: told of every pass as "medusa".

        Raises:
            UserError: no heads, or weights of another shape than the target's.
        """
        if not heads:
            raise UserError("source.heads=0: Medusa needs at least one head")
        self.num_heads = len(heads)
        config = target.config.get_text_config()
        self.layer = int(config.num_hidden_layers) - 1
        self.vocab_size = int(config.vocab_size)
        self._meter = meter
        self._device = target.get_output_embeddings().weight.device
        self._heads = [_Head(target, weights) for weights in heads]
        self.head_bytes = sum(head.num_bytes for head in self._heads) // len(self._heads)

    @classmethod
    def from_pair(cls, pair: Any, *, num_heads: int, meter: Meter) -> MedusaHeads:
        """The pair's first ``num_heads`` heads: trained if it has a folder, else untrained."""
        folder, last = pair.heads_folder, pair.num_layers - 1
        heads = own_medusa(num_heads)
        if folder is not None:
            heads = read_medusa(folder, pair.num_layers, num_heads)
        return cls(target=pair.part(last, last + 1), heads=heads, meter=meter)

    def logits(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """[R, V] of head ``number``, from 1, for hidden states [R, E] after the last layer.

        They may lie on the host, which is where other processes' arrive.
        """
        with torch.inference_mode(), self._meter.model("medusa"):
            return self._heads[number - 1](hidden.to(self._device))


class _Head:
    """One head."""

    def __init__(self, target: PreTrainedModel, weights: Weights) -> None:
        self._output = target.get_output_embeddings()
        matrix = self._output.weight
        width = matrix.shape[1]
        self._norm = copy.deepcopy(final_norm(target))
        shapes = {
            "norm.weight": self._norm.weight.shape,
            "block.weight": (width, width),
            "output.weight": matrix.shape,
        }
        own = {name: w.to(matrix.device, matrix.dtype) for name, w in weights.items()}
        for name, weight in own.items():
            if weight.shape != shapes.get(name):
                known = ", ".join(f"{k} {tuple(v)}" for k, v in shapes.items())
                raise UserError(
                    f"Medusa head: {name} of shape {tuple(weight.shape)}, but the target has"
                    f" {known}; train the heads again for this target (specdec train medusa_heads)"
                )
        if "norm.weight" in own:
            self._norm.weight = nn.Parameter(own["norm.weight"], requires_grad=False)
        self._block, self._matrix = own.get("block.weight"), own.get("output.weight")
        read = [*self._norm.parameters(), self._block]
        read.append(matrix if self._matrix is None else self._matrix)
        self.num_bytes = sum(w.numel() * w.element_size() for w in read if w is not None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        h = self._norm(hidden)
        if self._block is not None:
            h = h + F.silu(F.linear(h, self._block))
        found: torch.Tensor = self._output(h) if self._matrix is None else F.linear(h, self._matrix)
        return found


def read_medusa(folder: Path, layer: int, num_heads: int) -> list[Weights]:
    """Reads ``folder``/medusa-LAYER-K.safetensors for K = 1 .. ``num_heads``.

    Args:
        folder: of heads as ``specdec train`` writes them.
        layer: layers of the target.
        num_heads: how many.

    Raises:
        UserError: one is missing, or is not what its name says.
    """
    found: list[Weights] = []
    for number in range(1, num_heads + 1):
        path = folder / f"medusa-{layer}-{number}.safetensors"
        if not path.is_file():
            raise UserError(
                f"source.heads={num_heads}: model.exit_heads has no {path.name}: train it with"
                f" `specdec train exit_head 'heads=[{{kind: medusa, layer: {layer}, offset:"
                f" {number}}}]'`, take fewer (source.heads={number - 1}) or untrained ones with"
                " model.exit_heads=null"
            )
        about, tensors = read_tensors(path)
        said = tuple(about.get(key) for key in ("kind", "layer", "offset"))
        if said != ("medusa", str(layer), str(number)):
            raise UserError(f"{path.name} says that it is {'-'.join(map(str, said))}; name it so")
        found.append(tensors)
    return found


def own_medusa(num_heads: int) -> list[Weights]:
    """Untrained heads as Medusa starts them: the target's own norm and matrix, the block zero.

    They guess the next token once more.
    """
    return [{} for _ in range(num_heads)]
