"""Tree attention over our own caches, as an attention function that transformers calls.

Letters: H query heads, G key/value heads, D head size, R rows of one request in this pass, n slots
of its cache in use.

A pass packs the rows of one or many requests into one sequence [1, sum R]. All but attention treats
rows alike; here each request's rows meet their own cache. What this pass needs to know (the plan,
``AttentionStep``) comes from a context variable, so that nothing is set on a model. transformers
makes no mask for an attention function that it has no mask function for: ours come from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch
from numpy import count_nonzero
from transformers import AttentionInterface

from specdec.attention.backends import Kernel, Seen, attention_kernel, dense_attention
from specdec.attention.kv_cache import Rows
from specdec.attention.kv_storage import Pair
from specdec.device import to_device

IMPLEMENTATION = "specdec"
"""Name under which the attention function is registered with transformers."""

OPAQUE = "specdec_opaque"
"""The same function for compiled models: ``torch.compile`` calls it as it is, as one operation."""

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


class Attention(StrEnum):
    """How scores and values are put together; all are exact.

    ``DENSE``: one pass over all keys with one mask. ``TWO_LEVEL``: the prefix without a mask, the
    tree with it, merged by their log-sum-exp (PipeDec Alg. 1, which takes one softmax over both).
    ``FLASH``: two levels, the prefix by flash-attn. ``TRITON``: one launch of our own kernel.
    ``FLEX``: torch's FlexAttention.
    """

    DENSE = "dense"
    TWO_LEVEL = "two_level"
    TRITON = "triton"
    FLASH = "flash"
    FLEX = "flex"


def kernel_of(kind: Attention, device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The kernel of a kind of attention that ``specdec.kernels`` has; None for the others.

    Raises:
        UserError: where it cannot run.
    """
    known = kind in (Attention.TRITON, Attention.FLASH, Attention.FLEX)
    return attention_kernel(kind, device, dtype) if known else None


class Step(Protocol):
    """What the attention function and the runner's hooks need of the pass that they serve.

    Attributes:
        cache: what the model is given as its cache.
        captured: global layer index -> hidden states [1, sum R, E], filled by the runner's hooks.
        hidden: [1, sum R, E], what enters the first layer of a slice that is not the first.
    """

    cache: StepCache
    captured: dict[int, torch.Tensor]
    hidden: torch.Tensor | None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor: ...


_STEP: ContextVar[Step] = ContextVar("specdec_attention_step")


def current_step() -> Step:
    """The plan of the pass that is running."""
    return _STEP.get()


@contextmanager
def attending(step: Step) -> Iterator[None]:
    """Makes ``step`` the plan of the forward passes inside the block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def tree_attention(
    module: torch.nn.Module,  # noqa: ARG001 - the signature is transformers'
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,  # noqa: ARG001
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, in the form that transformers calls.

    Args:
        module, attention_mask, dropout: not used (inference; masks come from the plan).
        query: [1, H, sum R, D].
        key, value: [1, G, sum R, D], of the rows of this pass only.
        scaling: factor of the scores; 1 / sqrt(D) where None.
        sliding_window: keys at least so many positions back are not seen.
        softcap: scores s become softcap * tanh(s / softcap).
        **options: whatever else the family passes; checked once, when a runner is made.

    Returns:
        [1, sum R, H, D], and no attention weights.
    """
    step = _STEP.get()
    return step.attend(query, key, value, scaling, sliding_window, softcap, options), None


AttentionInterface.register(IMPLEMENTATION, tree_attention)
AttentionInterface.register(OPAQUE, torch.compiler.disable(tree_attention))


class StepCache:
    """Stands in for transformers' cache: notes the layer and passes the rows' keys on.

    They are written into the requests' caches by ``AttentionStep.attend``.
    """

    is_compileable = False

    def __init__(self, *, first_layer: int) -> None:
        self.first_layer = first_layer
        self.layer = -1

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        """Notes which layer of the slice is at work."""
        self.layer = layer_idx - self.first_layer
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always given explicitly, and no mask is made from this."""
        return 0


class _Part:
    """One request's share of a pass."""

    def __init__(self, rows: Rows, offset: int) -> None:
        self.rows = rows
        self.columns = slice(offset, offset + len(rows))
        self.store = rows.cache.view(rows).store
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self._seen: Seen | None = None

    def mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """[R, n], 0 where a row sees a slot and the lowest number where not; None: sees all."""
        rows = self.rows
        if window in self._masks:
            return self._masks[window]
        visible = rows.visible
        if window is not None and self.reaches(window):
            mask = self.mask(None, like)
        elif window is None and count_nonzero(visible) == visible.size:
            mask = None
        else:
            lowest = torch.finfo(like.dtype).min
            dense = np.zeros((len(rows), rows.end), _NUMPY.get(like.dtype, np.float32))
            dense[:, rows.first_masked :][~visible] = lowest
            if window is not None:
                keys = rows.cache.key_positions(rows.end)
                dense[keys <= rows.positions[:, None] - window] = lowest
            mask = torch.from_numpy(dense).to(device=like.device, dtype=like.dtype)
        self._masks[window] = mask
        return mask

    def seen(self, like: torch.Tensor) -> Seen:
        """The same for kernels."""
        if self._seen is None:
            rows, device = self.rows, like.device
            self._seen = Seen(
                lengths=to_device(np.array([rows.first_masked, rows.end]), device),
                visible=to_device(np.ascontiguousarray(rows.visible, np.uint8), device),
                num_slots=rows.end,
                dtype=like.dtype,
            )
        return self._seen

    def reaches(self, window: int | None) -> bool:
        """Whether a window of so many positions hides nothing from any row."""
        return window is None or int(self.rows.positions.max()) < window


class AttentionStep:
    """The plan of one pass: which rows meet which cache, and under which masks.

    Attributes:
        cache, captured, hidden: see ``Step``.
    """

    def __init__(
        self,
        *,
        rows: Sequence[Rows],
        first_layer: int,
        attention: Attention = Attention.DENSE,
        hidden: torch.Tensor | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        self._kernel = kernel
        self.cache = StepCache(first_layer=first_layer)
        self.captured: dict[int, torch.Tensor] = {}
        self.hidden = hidden
        self._two_level = attention is Attention.TWO_LEVEL
        self._parts = []
        offset = 0
        for part in rows:
            if len(part):
                self._parts.append(_Part(part, offset))
                offset += len(part)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Writes the rows' keys and values and attends; see ``tree_attention``."""
        layer = self.cache.layer
        if len(self._parts) == 1:
            part = self._parts[0]
            stored = part.store(layer, key, value)
            return self._one(part, query, stored, scaling, window, softcap).transpose(1, 2)
        outputs = []
        for part in self._parts:
            columns = part.columns
            stored = part.store(layer, key[:, :, columns], value[:, :, columns])
            outputs.append(self._one(part, query[:, :, columns], stored, scaling, window, softcap))
        return torch.cat(outputs, 2).transpose(1, 2)

    def _one(
        self,
        part: _Part,
        query: torch.Tensor,
        stored: Pair,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        key, value = stored
        if self._kernel is not None and softcap is None and part.reaches(window):
            return self._kernel(query, key, value, part.seen(query), scaling)
        mask = part.mask(window, query)
        if softcap is not None:
            return capped_attention(query, stored, mask, scaling, softcap)
        split = part.rows.first_masked
        if self._two_level and split and mask is not None and part.mask(None, query) is mask:
            return two_level_attention(query, stored, mask, scaling, split)
        return dense_attention(query, key, value, mask, scaling)


def capped_attention(
    query: torch.Tensor,
    stored: Pair,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention written out, for soft-capped scores (Gemma 2) which no fused kernel here offers.

    Args:
        query: [1, H, R, D].
        stored: keys and values, [1, G, n, D] each.
        mask: [R, n] or None.
        scaling, softcap: see ``tree_attention``.

    Returns:
        [1, H, R, D].
    """
    scores, values = _scores(query, stored, scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=_accumulator(query.dtype)).to(query.dtype)
    return (weights @ values).flatten(1, 2)


def two_level_attention(
    query: torch.Tensor,
    stored: Pair,
    mask: torch.Tensor,
    scaling: float | None,
    split: int,
) -> torch.Tensor:
    """Attention over the prefix, then over the tree, merged (PipeDec Alg. 1).

    Alg. 1 concatenates the scores of both parts and takes one softmax; merging normalised parts by
    their log-sum-exp is the same function, and lets a kernel without masks serve the long prefix.

    Args:
        query: [1, H, R, D].
        stored: keys and values, [1, G, n, D] each.
        mask: [R, n]; 0 in the columns before ``split``.
        scaling: see ``tree_attention``.
        split: slots that every row sees.

    Returns:
        [1, H, R, D].
    """
    key, value = stored
    prefix = key[:, :, :split], value[:, :, :split]
    tree = key[:, :, split:], value[:, :, split:]
    first, first_lse = _attention_lse(query, prefix, None, scaling)
    second, second_lse = _attention_lse(query, tree, mask[:, split:], scaling)
    share = torch.sigmoid(second_lse - first_lse).unsqueeze(-1).to(query.dtype)
    return torch.lerp(first, second, share)


def _attention_lse(
    query: torch.Tensor, stored: Pair, mask: torch.Tensor | None, scaling: float | None
) -> Pair:
    """Normalised attention [1, H, R, D] and its log-sum-exp [1, H, R]."""
    if query.device.type == "cpu":
        key, value = stored
        groups = key.shape[1]
        folded = query[0].unflatten(0, (groups, -1))  # [G, H / G, R, D]
        shape = (groups, folded.shape[1], *key.shape[2:])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded,
            key[0].unsqueeze(1).expand(shape),
            value[0].unsqueeze(1).expand(shape),
            attn_mask=None if mask is None else mask[None, None],
            scale=scaling,
        )
        return out.flatten(0, 1).unsqueeze(0), lse.flatten(0, 1).unsqueeze(0)
    return _written_lse(query, stored, mask, scaling)


def _written_lse(
    query: torch.Tensor, stored: Pair, mask: torch.Tensor | None, scaling: float | None
) -> Pair:
    """``_attention_lse`` written out, for devices without that kernel."""
    scores, values = _scores(query, stored, scaling)
    if mask is not None:
        scores = scores + mask
    scores = scores.to(_accumulator(query.dtype))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(query.dtype)
    return (weights @ values).flatten(1, 2), lse.flatten(1, 2)


def _scores(query: torch.Tensor, stored: Pair, scaling: float | None) -> Pair:
    """Scores [1, G, H / G, R, n] and the values to weigh, [1, G, 1, n, D]."""
    key, value = stored
    grouped = query.unflatten(1, (key.shape[1], -1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return grouped @ key.unsqueeze(2).transpose(-1, -2) * scale, value.unsqueeze(2)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which softmax is taken: float32 for half types."""
    return dtype if dtype == torch.float64 else torch.float32
