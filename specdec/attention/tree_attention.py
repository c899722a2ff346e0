"""Tree attention over this library's caches, as an attention function that transformers calls.

A pass packs the rows of one or more requests into one sequence [1, sum R]. All layers but attention
treat rows alike; attention lets each request's rows attend to their own cache. The pass's plan
(``PassPlan``) is the keyword argument ``PLAN`` of the model's forward, which transformers passes on
to every layer and to the attention function. transformers creates no mask for an attention function
without a registered mask function; masks come from the plan.

Shape letters: H query heads, G key/value heads, D head size, R rows of one request in this pass, n
used slots of its cache, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy import count_nonzero
from torch import Tensor
from transformers import AttentionInterface

from specdec.attention.backends import (
    Attention,
    Kernel,
    Visibility,
    dense_attention,
    folded_heads,
    two_level_attention,
)
from specdec.attention.kv_cache import Pair, Rows, Store
from specdec.device import to_device
from specdec.errors import UserError
from specdec.types import HiddenName

IMPLEMENTATION = "specdec"

PLAN = "specdec_plan"
"""Name of the keyword argument of a model's forward that takes the ``PassPlan``."""

OPAQUE = "specdec_opaque"
"""The attention function for compiled models, which ``torch.compile`` does not trace into."""


@dataclass(slots=True)
class ScoreOptions:
    """How a layer computes its scores, as transformers passes it.

    Attributes:
        scaling: factor of the scores; None means 1 / sqrt(D).
        window: keys at least this many positions back are masked; None: no sliding window.
        softcap: scores s become softcap * tanh(s / softcap); None: no cap.
        others: further arguments of the family; checked once, when a runner is created.
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    others: dict[str, Any] = field(default_factory=dict)


class PassPlan:
    """The plan of one pass, as the attention function and the runner's hooks use it.

    ``captured`` maps names to hidden states [1, sum R, E], filled by hooks. ``hidden``, [1, sum R,
    E], is the input of the first layer of a slice that is not the first, else None.
    """

    def __init__(self, *, first_layer: int, hidden: Tensor | None) -> None:
        self.cache = PassCache(first_layer=first_layer)
        self.captured: dict[HiddenName, Tensor] = {}
        self.hidden = hidden

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        """Stores the rows' keys and values, then attends; shapes as in ``tree_attention``."""
        raise NotImplementedError


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001 - transformers defines the signature
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    sliding_window: int | None = None,
    softcap: float | None = None,
    specdec_plan: PassPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention of one layer, with the signature that transformers calls.

    Maps query [1, H, sum R, D], and key and value [1, G, sum R, D] of this pass's rows, to [1, sum
    R, H, D]; the second result, None, replaces the attention weights.
    """
    if specdec_plan is None:
        kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
        raise UserError(
            f"model type {kind!r} cannot be used: transformers passes no arguments of the model on"
            " to its attention; use a family such as llama, qwen3 or gpt2"
        )
    options = ScoreOptions(scaling, sliding_window, softcap, others)
    return specdec_plan.attend(query, key, value, options), None


AttentionInterface.register(IMPLEMENTATION, tree_attention)
AttentionInterface.register(OPAQUE, torch.compiler.disable(tree_attention))


class PassCache:
    """Replaces transformers' cache: records the current layer and returns the rows' keys unchanged.

    ``PassPlan.attend`` writes them into the requests' caches. ``first_layer`` is a global index,
    ``layer`` counts within the slice (-1 before the first layer).
    """

    is_compileable = False

    def __init__(self, *, first_layer: int) -> None:
        self.first_layer = first_layer
        self.layer = -1

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Pair:
        self.layer = layer_idx - self.first_layer
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: positions are passed explicitly, and no mask is derived from the length."""
        return 0


class RequestPart:
    """One request's rows in a pass; caches masks in the dtype and on the device of its cache."""

    def __init__(self, rows: Rows, offset: int = 0) -> None:
        """``offset`` is the number of rows that precede these in the pass."""
        self.rows = rows
        self.columns = slice(offset, offset + len(rows))
        self._bits: dict[bool, Visibility] = {}

    @cached_property
    def store(self) -> Store:
        return self.rows.cache.writer(self.rows)

    def mask(self, window: int | None, folds: int = 1) -> Tensor | None:
        """Returns the additive mask [folds R, n]; None if every row sees every slot.

        It is built on the device from bits, because [R, n] would have to be copied from the host.
        """
        if self.within(window):
            window = None
            if count_nonzero(self.rows.visible) == self.rows.visible.size:
                return None
        return self.bits(has_window=window is not None).mask(window, folds)

    def bits(self, *, has_window: bool = False) -> Visibility:
        """Returns the visibility on the device; masks of sliding windows need ``has_window``."""
        if has_window not in self._bits:
            rows, device = self.rows, self.rows.cache.spec.device
            arrays = {
                "lengths": np.array([rows.first_masked, rows.end]),
                "visible": np.ascontiguousarray(rows.visible, np.uint8),
            }
            if has_window:
                arrays["positions"] = rows.positions
                keys = rows.cache.key_positions(rows.end)[rows.first_masked :]
                arrays["column_positions"] = keys
            there: dict[str, Any] = {n: to_device(array, device) for n, array in arrays.items()}
            self._bits[has_window] = Visibility(
                num_slots=rows.end,
                dtype=rows.cache.spec.dtype,
                causal=rows.causal,
                **there,
            )
        return self._bits[has_window]

    def within(self, window: int | None) -> bool:
        """Returns whether a sliding window of this size would mask nothing."""
        return window is None or int(self.rows.positions.max()) < window


def host_mask(rows: Rows, window: int | None) -> npt.NDArray[Any] | None:
    """Returns the additive mask [R, n] for kernels that hide later slots themselves.

    None: every row sees all slots up to its own. It is float32 if numpy lacks the cache's dtype.
    """
    part = RequestPart(rows)
    if part.within(window):
        window = None
        if rows.causal:
            return None
    mask = part.bits(has_window=window is not None).mask(window)
    return mask.float().numpy() if mask.dtype is torch.bfloat16 else mask.numpy()


class AttentionPlan(PassPlan):
    """The plan of one pass that is neither captured nor exact."""

    def __init__(
        self,
        *,
        rows: Sequence[Rows],
        first_layer: int,
        attention: Attention = Attention.DENSE,
        hidden: Tensor | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__(first_layer=first_layer, hidden=hidden)
        self._kernel = kernel
        self._two_level = attention is Attention.TWO_LEVEL
        self._parts = []
        offset = 0
        for part in rows:
            if len(part):
                self._parts.append(RequestPart(part, offset))
                offset += len(part)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        # Plain views here: this runs once per layer and token, where einops costs microseconds.
        layer = self.cache.layer
        if len(self._parts) == 1:
            part = self._parts[0]
            stored = part.store(layer, key, value)
            return self._attend_one(part, query, stored, options).transpose(1, 2)
        outputs = []
        for part in self._parts:
            columns = part.columns
            stored = part.store(layer, key[:, :, columns], value[:, :, columns])
            outputs.append(self._attend_one(part, query[:, :, columns], stored, options))
        return torch.cat(outputs, 2).transpose(1, 2)

    def _attend_one(
        self, part: RequestPart, query: Tensor, stored: Pair, options: ScoreOptions
    ) -> Tensor:
        """Attends one request's rows to its cache ``stored`` [1, G, n, D]; returns [1, H, R, D]."""
        scaling, window, softcap = options.scaling, options.window, options.softcap
        if softcap is None and self._kernel is not None and part.within(window):
            return self._kernel(query, *stored, part.bits(), scaling)
        split = part.rows.first_masked
        if self._two_level and split and softcap is None and part.within(window):
            mask = part.mask(None)
            if mask is not None:
                return two_level_attention(query, *stored, mask, scaling, split)
        folds = folded_heads(query, stored[0]) if softcap is None else 1
        return dense_attention(query, *stored, part.mask(window, folds), scaling, softcap)
