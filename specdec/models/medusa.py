"""Medusa heads, which predict several future tokens from one hidden state of the target.

Medusa (arXiv 2401.10774), section 2.1: with h the last hidden state at position t, the target's
output head predicts token t + 1, and head k (k = 1 .. K) predicts token t + 1 + k:

    softmax(W2_k (SiLU(W1_k h) + h))

Here each head computes h from the output of the target's last layer by a norm of its own, which
starts as a copy of the target's final norm; W1 is ``block``, W2 is ``output``.

Shape letters: R rows, E hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models.exits import checked_ids, read_tensors, spread
from specdec.models.runner import backend_module, refuse_wrong
from specdec.models.slicing import final_norm

Weights = Mapping[str, Tensor]
"""Tensors of one head, all optional: norm.weight and output.weight (default: the target's),
block.weight (default: no block), output.ids (token id of each output row; default: all tokens)."""

_SAMPLE = 3  # states of the comparison with eager passes


class MedusaHeads:
    """K Medusa heads, which read the output of the target's last layer, whose index is ``layer``;
    ``head_bytes`` is the mean number of bytes of weights that a head reads per pass.
    """

    def __init__(
        self,
        *,
        target: PreTrainedModel,
        heads: Sequence[Weights],
        meter: Meter,
        backend: str = "eager",
    ) -> None:
        """Builds a head per entry of ``heads``; a norm or output matrix that an entry lacks is
        the target's. UserError if ``backend`` is "onnx" and its logits differ from PyTorch's.
        """
        if not heads:
            raise UserError("source.heads=0: Medusa needs at least one head")
        self.num_heads = len(heads)
        self.trained = any(heads)  # from files
        config = target.config.get_text_config()
        self.layer = int(config.num_hidden_layers) - 1
        self.vocab_size = int(config.vocab_size)
        self._meter = meter
        self._device = target.get_output_embeddings().weight.device
        self._heads = [MedusaHead(target, weights) for weights in heads]
        self.head_bytes = sum(head.num_bytes for head in self._heads) // len(self._heads)
        self._onnx = None
        if backend == "onnx":
            self._onnx = backend_module("specdec.models.onnx.heads").OnnxMedusa(target, self._heads)
            self._compare(self._onnx, int(config.hidden_size))

    @classmethod
    def from_pair(cls, pair: Any, *, num_heads: int, meter: Meter) -> MedusaHeads:
        folder, last = pair.heads_folder, pair.num_layers - 1
        # Untrained heads are the target's own norm and output matrix, from which Medusa's training
        # starts; they predict the next token again.
        heads: list[Weights] = [{}] * num_heads
        if folder is not None:
            heads = read_medusa(folder, pair.num_layers, num_heads)
        part = pair.part(last, last + 1)
        return cls(target=part, heads=heads, meter=meter, backend=pair.backend)

    def logits(self, number: int, hidden: Tensor) -> Tensor:
        """Returns logits [R, V] of head ``number``, 1 .. K, for ``hidden`` [R, E] on any device."""
        with torch.inference_mode(), self._meter.model("medusa"):
            if self._onnx is not None:
                return self._onnx.logits(number, hidden)
            return self._heads[number - 1](hidden.to(self._device))

    def _compare(self, onnx: Any, hidden_size: int) -> None:
        hidden = torch.randn(_SAMPLE, hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            found = [onnx.logits(i + 1, hidden) for i in range(self.num_heads)]
            refuse_wrong(found, [head(hidden) for head in self._heads], "Medusa head")


class MedusaHead:
    """One head: a norm, ``block`` [E, E] (None: no block) and ``output`` [V, E] (None: the target's
    matrix). If a head predicts only the U tokens ``ids``, int64[U], ``output`` is [U, E].
    """

    def __init__(self, target: PreTrainedModel, weights: Weights) -> None:
        self._output = target.get_output_embeddings()
        matrix = self._output.weight
        self.vocab_size, width = matrix.shape
        self.norm = copy.deepcopy(final_norm(target))
        shapes = {
            "norm.weight": self.norm.weight.shape,
            "block.weight": (width, width),
            "output.weight": matrix.shape,
        }
        loaded = {name: w.to(matrix.device, matrix.dtype) for name, w in weights.items()}
        loaded.pop("output.ids", None)
        self.ids: Tensor | None = None
        if "output.ids" in weights:
            self.ids = checked_ids(weights["output.ids"], len(matrix)).to(matrix.device)
            loaded.setdefault("output.weight", matrix[self.ids])
            shapes["output.weight"] = (len(self.ids), width)
        for name, weight in loaded.items():
            if weight.shape != shapes.get(name):
                known = ", ".join(f"{k} {tuple(v)}" for k, v in shapes.items())
                raise UserError(
                    f"Medusa head: {name} has shape {tuple(weight.shape)}, but the target needs"
                    f" {known}; train the heads again for this target (specdec train medusa)"
                )
        if "norm.weight" in loaded:
            self.norm.weight = nn.Parameter(loaded["norm.weight"], requires_grad=False)
        self.block, self.output = loaded.get("block.weight"), loaded.get("output.weight")
        used = [*self.norm.parameters(), self.block]
        used.append(matrix if self.output is None else self.output)
        self.num_bytes = sum(w.nbytes for w in used if w is not None)

    def __call__(self, hidden: Tensor) -> Tensor:
        h = self.norm(hidden)
        if self.block is not None:
            h = h + F.silu(F.linear(h, self.block))
        logits: Tensor
        logits = self._output(h) if self.output is None else F.linear(h, self.output)
        return spread(logits, self.ids, self.vocab_size)


def read_medusa(folder: Path, layer: int, num_heads: int) -> list[Weights]:
    """Reads heads 1 .. ``num_heads``; head K is in ``folder``/medusa-``layer``-K.safetensors."""
    heads: list[Weights] = []
    for number in range(1, num_heads + 1):
        path = folder / f"medusa-{layer}-{number}.safetensors"
        if not path.is_file():
            raise UserError(
                f"source.heads={num_heads}: model.exit_heads has no {path.name}: train it with"
                f" `specdec train medusa heads={num_heads}`"
                + (f", use fewer (source.heads={number - 1})" if number > 1 else "")
                + " or use untrained ones with model.exit_heads=null"
            )
        expected = {"kind": "medusa", "layer": layer, "offset": number}
        heads.append(read_tensors(path, expected))
    return heads
