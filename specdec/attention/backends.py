"""Implementations of attention besides ``dense_attention``, and the choice among them.

In every function, queries and outputs are [1, H, R, D], keys and values [1, G, C, D], and
``scaling`` multiplies the scores; None means 1 / sqrt(D).

Shape letters: H query heads, G key/value heads, P = H / G, D head size, R rows of the pass, C cache
slots, M columns of the tree mask.
"""

from enum import StrEnum

import torch
from einops import rearrange
from torch import Tensor

from specdec.attention import support
from specdec.attention.tree_attention import (
    Kernel,
    Visibility,
    accumulator,
    scores_of,
    weighted_values,
)
from specdec.errors import UserError


class Attention(StrEnum):
    """Implementations of attention; none is an approximation.

    ``DENSE``: one torch call over all cache slots with one mask. ``FLASH``: flash-attn, merged with
    torch's attention to the tree, if any (PipeDec Alg. 1). ``TRITON``: one Triton kernel.
    """

    DENSE = "dense"
    TRITON = "triton"
    FLASH = "flash"


def auto_attention(device: torch.device, dtype: torch.dtype) -> Attention:
    """Returns ``TRITON`` on GPUs that can run it, else ``DENSE``. The Triton kernel uses all
    multiprocessors; torch with a mask uses only one per key/value head and block of rows.
    """
    if device.type == "cuda" and support.triton_problem(device, dtype) is None:
        return Attention.TRITON
    return Attention.DENSE


def attention_kernel(kind: str, device: torch.device, dtype: torch.dtype) -> Kernel | None:
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
    return None


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scaling: float | None
) -> Tensor:
    """Computes attention by flash-attn, which has only causal masks. It suffices for prompts; for
    trees it covers the prefix, torch covers the tree, and both are merged (PipeDec Alg. 1).
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


# Attention with its log-sum-exp.


def masked_lse(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Returns attention and log-sum-exp [1, H, R] over ``visible`` slots, bool[R, C]; None: all."""
    scores = scores_of(query, key, scaling).to(accumulator(query.dtype))
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(query.dtype)
    return weighted_values(weights, value), rearrange(lse, "b g p r -> b (g p) r")
