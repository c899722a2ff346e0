"""Passes by transformers' own forward, operation by operation or compiled.

Shape letters: R rows of one request, A rows whose logits are computed, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.backends import Attention, Kernel, attention_kernel
from specdec.attention.kv_cache import Rows
from specdec.attention.kv_storage import Pair
from specdec.attention.tree_attention import PLAN, AttentionPlan, PassCache, PassPlan
from specdec.device import to_device
from specdec.models.backends.interface import Backend, ModelSlice, RunnerOutput
from specdec.models.slicing import cache_argument, final_norm
from specdec.types import IntArray


class Eager(Backend):
    """Calls the model's forward; the other backends build on it."""

    def __init__(self, layers: ModelSlice, attention: str, forward: Callable[..., Any]) -> None:
        """``forward`` is the slice's model or its compiled form."""
        self.layers = layers
        spec = layers.spec
        self.kernel: Kernel | None = attention_kernel(attention, spec.device, spec.dtype)
        self.attention = Attention(attention)
        self._forward = forward
        is_normed = any(name.normed for name in layers.capture)
        self._norm = final_norm(layers.model) if is_normed else None

    def run(
        self, rows: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray | None
    ) -> RunnerOutput:
        if len(rows) == 1:
            tokens, positions = rows[0].tokens, rows[0].positions
        else:
            tokens = np.concatenate([part.tokens for part in rows])
            positions = np.concatenate([part.positions for part in rows])
        device, layers = self.layers.spec.device, self.layers
        step = AttentionPlan(
            rows=rows,
            first_layer=layers.first_layer,
            attention=self.attention,
            hidden=None if hidden is None else hidden.to(device)[None],
            kernel=self.kernel,
        )
        keep: int | Tensor | None = None
        if layers.wants_logits(logits_rows):
            keep = 0 if logits_rows is None else to_device(logits_rows, device)
        ids, places = (to_device(array, device) for array in (tokens, positions))
        return self.compute(step, ids, places, keep)

    def compute(
        self, step: PassPlan, tokens: Tensor, positions: Tensor, keep: int | Tensor | None
    ) -> RunnerOutput:
        """Calls the model's forward on tokens and positions int64[R].

        ``keep`` lists the rows whose logits are computed, int64[A]; 0 means all, None means none.
        """
        layers, model = self.layers, self.layers.model
        inputs = forward_inputs(model, step, tokens, positions)
        if self._forward is not model:
            name = cache_argument(model)
            inputs[name] = _OpaqueCache(inputs[name])
        if keep is None:
            model.base_model(**inputs)
            logits = None
        else:
            logits = self._forward(**inputs, logits_to_keep=keep).logits[0]
        found = {name: states[0] for name, states in step.captured.items()}
        if self._norm is not None:
            found[layers.output._replace(normed=True)] = self._norm(found[layers.output])
        return RunnerOutput(
            hidden=found[layers.output],
            logits=logits,
            captured={name: found[name] for name in layers.capture},
        )


class _OpaqueCache(PassCache):
    """A ``PassCache`` that is not traced: a trace would be specialised on each layer's index."""

    def __init__(self, cache: PassCache) -> None:
        self._cache = cache

    @torch.compiler.disable
    def update(self, *args: Any, **kwargs: Any) -> Pair:
        return self._cache.update(*args, **kwargs)


def forward_inputs(
    model: PreTrainedModel, step: PassPlan, tokens: Tensor, positions: Tensor
) -> dict[str, Any]:
    """Returns the arguments of a slice's forward for tokens and positions int64[R].

    In a slice that is not the first, placeholders replace the embeddings, because a hook inserts
    the hidden states of ``step``.
    """
    inputs: dict[str, Any] = {
        "position_ids": positions[None],
        cache_argument(model): step.cache,
        PLAN: step,
    }
    if step.hidden is None:
        inputs["input_ids"] = tokens[None]
    else:
        width = model.get_input_embeddings().embedding_dim
        inputs["inputs_embeds"] = step.hidden.new_empty(1, len(tokens), width)
    return inputs
