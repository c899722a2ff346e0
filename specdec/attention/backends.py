"""Implementations of attention of one request's rows over its cached keys and values.

In every function, queries and outputs are [1, H, R, D], keys and values [1, G, C, D], and
``scaling`` multiplies the scores; None means 1 / sqrt(D).

Shape letters: H query heads, G key/value heads, P = H / G, D head size, R rows of the pass, C cache
slots, M columns of the tree mask.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from specdec.attention import support
from specdec.errors import UserError

_FLEX_SHAPES = 128  # recompilation limit of FlexAttention: one per number of rows and length
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(StrEnum):
    """Implementations of attention; all are exact.

    ``DENSE``: one call over all slots with one mask. ``TWO_LEVEL``: the prefix without a mask, the
    tree with one, merged by their log-sum-exp (PipeDec Alg. 1). ``FLASH``: chunks of a prompt by
    flash-attn, trees in two levels with the prefix by flash-attn. ``TRITON``: one launch of
    ``specdec.attention.triton_kernel``. ``FLEX``: torch's FlexAttention.
    """

    DENSE = "dense"
    TWO_LEVEL = "two_level"
    TRITON = "triton"
    FLASH = "flash"
    FLEX = "flex"


class Visibility:
    """Which cache slots each row of a pass attends to, as tensors on the device.

    Every row sees the slots before ``first`` and none from ``end`` on (``lengths``: int32[2],
    (first, end)); ``visible``, uint8[R, M], says which slots from ``first`` on each row sees.
    ``causal`` is true if each row sees exactly the slots up to its own, as in a chunk of a prompt.
    """

    def __init__(
        self,
        *,
        lengths: Tensor,
        visible: Tensor,
        num_slots: int,
        dtype: torch.dtype,
        positions: Tensor | None = None,
        column_positions: Tensor | None = None,
        causal: bool = False,
    ) -> None:
        """Stores the inputs; ``mask`` builds masks on first use.

        Args:
            num_slots: C, number of columns of a mask.
            positions, column_positions: int64[R] and int64[M], absolute positions of the rows and
                of the entries from ``first`` on; needed for sliding windows only.
            causal: true only if the last row's slot is also the last one.
        """
        self.causal = causal
        self.lengths = lengths.to(torch.int32)
        self.visible = visible
        self._num_slots = num_slots
        self._dtype = dtype
        self._positions = positions
        self._column_positions = column_positions
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def mask(self, window: int | None = None, folds: int = 1) -> Tensor:
        """Returns the additive mask [folds * R, C]: 0 where a row sees a slot, else the minimum.

        ``folds`` is the number of copies of the rows, one after the other; see ``folded_heads``.
        """
        if folds > 1 and (window, folds) not in self._masks:
            self._masks[window, folds] = repeat(self.mask(window), "r c -> (p r) c", p=folds)
        if (window, folds) not in self._masks:
            first, end = self.lengths[0], self.lengths[1]
            slots = torch.arange(self._num_slots, device=self.lengths.device)
            columns = (slots - first).clamp(0, self.visible.shape[1] - 1)
            seen = (slots < first) | (self.visible.bool()[:, columns] & (slots < end))
            if window is not None:
                assert self._positions is not None, "windows need positions"
                assert self._column_positions is not None, "windows need positions"
                slot_positions = torch.where(slots < first, slots, self._column_positions[columns])
                seen = seen & (slot_positions > self._positions[:, None] - window)
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
            self._masks[window, 1] = mask.masked_fill(~seen, torch.finfo(self._dtype).min)
        return self._masks[window, folds]


def auto_attention(device: torch.device, dtype: torch.dtype) -> Attention:
    """Prefers Triton, which splits the context among all multiprocessors of a GPU.

    With a mask, the kernels behind ``DENSE`` use one per key/value head and block of rows.
    """
    if device.type == "cuda" and support.triton_problem(device, dtype) is None:
        return Attention.TRITON
    return Attention.DENSE


Kernel = Callable[[Tensor, Tensor, Tensor, Visibility, float | None], Tensor]
"""(query, key, value, visibility, scaling) -> output."""


def attention_kernel(kind: str, device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Returns the kernel of ``model.attention=kind``; None for ``DENSE`` and ``TWO_LEVEL``."""
    setting = f"model.attention={kind}"
    if kind not in list(Attention):
        raise UserError(f"{setting} is unknown; choose {', '.join(Attention)}")
    if kind == Attention.TRITON:
        support.require(support.triton_problem(device, dtype), setting)
        from specdec.attention.triton_kernel import TreeAttention

        launch = TreeAttention()
        return lambda query, key, value, seen, scaling: launch(
            query, key, value, lengths=seen.lengths, visible=seen.visible, scaling=scaling
        )
    if kind == Attention.FLASH:
        support.require(support.flash_problem(device, dtype), setting)
        return flash_attention
    return _flex_kernel(device.type) if kind == Attention.FLEX else None


def folded_heads(query: Tensor, key: Tensor) -> int:
    """Returns how many query heads ``dense_attention`` folds into the rows of one head."""
    return query.shape[1] // key.shape[1] if query.device.type == "cuda" else 1


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
) -> Tensor:
    """Calls torch's ``scaled_dot_product_attention`` with one mask over all slots.

    On CUDA, only cuDNN supports a mask together with grouped query heads, and cuDNN makes a new
    execution plan for every context length, which takes longer than many passes. So on CUDA the P
    query heads of each key/value head are folded into rows of one head, and cuDNN is excluded.

    ``mask``, [R, C] or repeated for the folded heads [P R, C], is added to the scores; None means
    that every row sees every slot. ``softcap`` is explained in ``capped_attention``.
    """
    if softcap is not None:
        return capped_attention(query, key, value, mask, scaling, softcap)
    if query.device.type != "cuda":
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    with sdpa_kernel(_ANY_LENGTH):
        (_, heads, rows, _), groups = query.shape, key.shape[1]
        if mask is None or heads == groups:
            return scaled_dot_product_attention(
                query, key, value, mask, scale=scaling, enable_gqa=heads != groups
            )
        if len(mask) == rows:
            mask = repeat(mask, "r c -> (p r) c", p=heads // groups)
        output = scaled_dot_product_attention(
            rearrange(query, "b (g p) r d -> b g (p r) d", g=groups),
            key,
            value,
            mask,
            scale=scaling,
        )
        return rearrange(output, "b g (p r) d -> b (g p) r d", r=rows)


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Computes attention in elementary operations, because no kernel here supports soft caps.

    Scores s become softcap * tanh(s / softcap) (Gemma 2) unless ``softcap`` is None.
    """
    scores = _scores(query, key, scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=_accumulator(query.dtype)).to(query.dtype)
    return _weighted_values(weights, value)


def two_level_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, split: int
) -> Tensor:
    """Attends to the prefix, the first ``split`` slots, and to the tree, and merges both results.

    PipeDec Alg. 1 takes one softmax of both parts' scores. Merging the normalised parts by their
    log-sum-exp is the same function and needs no mask for the long prefix. ``mask`` [R, C] must be
    0 in the columns before ``split``.
    """
    prefix = query, key[:, :, :split], value[:, :, :split]
    tree = query, key[:, :, split:], value[:, :, split:]
    prefix_output, prefix_lse = _attention_lse(*prefix, None, scaling)
    tree_output, tree_lse = _attention_lse(*tree, mask[:, split:], scaling)
    tree_share = torch.sigmoid(tree_lse - prefix_lse).unsqueeze(-1).to(query.dtype)
    return torch.lerp(prefix_output, tree_output, tree_share)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scaling: float | None
) -> Tensor:
    """Runs flash-attn over all slots for a chunk of a prompt, else over the prefix only.

    It has only causal masks, so torch attends to the tree; both are merged (PipeDec Alg. 1).
    """
    from flash_attn import flash_attn_with_kvcache

    prefix_output, prefix_lse = flash_attn_with_kvcache(
        rearrange(query, "b h r d -> b r h d"),
        rearrange(key, "b g c d -> b c g d"),
        rearrange(value, "b g c d -> b c g d"),
        cache_seqlens=visibility.lengths[1:] if visibility.causal else visibility.lengths[:1],
        softmax_scale=scaling,
        causal=visibility.causal,  # aligned at the last row and the last slot
        return_softmax_lse=True,
    )
    if visibility.causal:
        return rearrange(prefix_output, "b r h d -> b h r d")
    first, end = visibility.lengths[0], visibility.lengths[1]
    # An empty prefix gets weight 0, whatever flash-attn returns for it.
    prefix_lse = torch.where(first > 0, prefix_lse, -torch.inf)
    prefix_output = torch.where(first > 0, prefix_output, 0.0)
    columns = torch.arange(visibility.visible.shape[1], device=key.device)
    slots = (first + columns).clamp(max=key.shape[2] - 1)
    visible = visibility.visible.bool() & (columns < end - first)
    tree_output, tree_lse = masked_lse(
        query, key.index_select(2, slots), value.index_select(2, slots), visible, scaling
    )
    tree_share = torch.sigmoid(tree_lse - prefix_lse.to(tree_lse.dtype)).unsqueeze(-1)
    prefix_output = rearrange(prefix_output, "b r h d -> b h r d")
    return torch.lerp(prefix_output, tree_output, tree_share.to(query.dtype))


@cache
def _flex_kernel(device_type: str) -> Kernel:
    """Returns torch's FlexAttention, compiled on CUDA, with the mask as a score modification."""
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = flex_attention  # uncompiled it materialises all scores: correct, but slow
    if device_type == "cuda":
        run = torch.compile(flex_attention, dynamic=False)
        # Each number of rows and each context length is compiled; torch's default limit is 8.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _FLEX_SHAPES)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scaling: float | None
    ) -> Tensor:
        mask = visibility.mask()

        def masked(score: Any, batch: Any, head: Any, row: Any, slot: Any) -> Any:  # noqa: ARG001
            return score + mask[row, slot]

        grouped = query.shape[1] != key.shape[1]
        output: Tensor = run(query, key, value, score_mod=masked, scale=scaling, enable_gqa=grouped)
        return output

    return attend


# Attention with its log-sum-exp.


def masked_lse(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Returns attention and its log-sum-exp [1, H, R]; ``visible`` is bool[R, C], None for all."""
    scores = _scores(query, key, scaling).to(_accumulator(query.dtype))
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(query.dtype)
    return _weighted_values(weights, value), rearrange(lse, "b g p r -> b (g p) r")


def _attention_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Computes ``masked_lse`` for an additive mask, by torch's fused kernel on the CPU."""
    if query.device.type != "cpu":
        return masked_lse(query, key, value, None if mask is None else mask == 0, scaling)
    num_groups = key.shape[1]
    per_group = query.shape[1] // num_groups
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rearrange(query, "1 (g p) r d -> g p r d", g=num_groups),
        repeat(key, "1 g c d -> g p c d", p=per_group),
        repeat(value, "1 g c d -> g p c d", p=per_group),
        attn_mask=None if mask is None else mask[None, None],
        scale=scaling,
    )
    return rearrange(output, "g p r d -> 1 (g p) r d"), rearrange(lse, "g p r -> 1 (g p) r")


def _scores(query: Tensor, key: Tensor, scaling: float | None) -> Tensor:
    """Returns the scaled scores [1, G, P, R, C]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = rearrange(query, "b (g p) r d -> b g p r d", g=key.shape[1])
    return grouped @ rearrange(key, "b g c d -> b g 1 d c") * scale


def _weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """Sums the values [1, G, C, D], weighted by [1, G, P, R, C], to [1, H, R, D]."""
    output = weights @ rearrange(value, "b g c d -> b g 1 c d")
    return rearrange(output, "b g p r d -> b (g p) r d")


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
