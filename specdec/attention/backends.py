"""Kinds of attention over a cache, behind one call, for plain passes and for captured ones.

Letters: H query heads, G key/value heads, D head size, R rows, C slots given, M columns of the
mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from specdec.errors import UserError
from specdec.kernels import support


class Seen:
    """Which slots the rows of a pass see, on the device.

    Attributes:
        lengths: int32[2]: every row sees the slots before the first number; no row looks at slots
            from the second number on.
        visible: uint8[R, M]: which of the slots from ``lengths[0]`` on each row sees.
    """

    def __init__(
        self,
        *,
        lengths: torch.Tensor,
        visible: torch.Tensor,
        num_slots: int,
        dtype: torch.dtype,
        positions: torch.Tensor | None = None,
        column_positions: torch.Tensor | None = None,
    ) -> None:
        """Keeps what masks are made from; a mask is made when it is first asked for.

        Args:
            lengths: integer [2].
            visible: uint8[R, M].
            num_slots: C, columns of a mask.
            dtype: of a mask.
            positions: int64[R], absolute; needed for windows only, as is the next.
            column_positions: int64[M], of what the slots from ``lengths[0]`` on hold.
        """
        self.lengths = lengths.to(torch.int32)
        self.visible = visible
        self._num_slots = num_slots
        self._dtype = dtype
        self._positions = positions
        self._column_positions = column_positions
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None = None) -> torch.Tensor:
        """[R, C]: 0 where a row sees a slot, else the lowest number; see ``tree_attention``."""
        if window not in self._masks:
            first, end = self.lengths[0], self.lengths[1]
            slots = torch.arange(self._num_slots, device=self.lengths.device)
            columns = (slots - first).clamp(0, self.visible.shape[1] - 1)
            seen = (slots < first) | (self.visible.bool()[:, columns] & (slots < end))
            if window is not None:
                assert self._positions is not None, "windows need positions"
                assert self._column_positions is not None, "windows need positions"
                held = torch.where(slots < first, slots, self._column_positions[columns])
                seen = seen & (held > self._positions[:, None] - window)
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
            self._masks[window] = mask.masked_fill(~seen, torch.finfo(self._dtype).min)
        return self._masks[window]


_FLEX_SHAPES = 128
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Seen, float | None], torch.Tensor]
"""(query [1, H, R, D], key [1, G, C, D], value likewise, seen, scaling) -> [1, H, R, D]."""


def attention_kernel(kind: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel of ``model.attention=kind``.

    Raises:
        UserError: where it cannot run, with the reason and the remedy.
    """
    asked = f"model.attention={kind}"
    if kind == "triton":
        support.require(support.triton_problem(device, dtype), asked)
        return _triton_kernel()
    if kind == "flash":
        support.require(support.flash_problem(device, dtype), asked)
        return flash_attention
    if kind == "flex":
        return _flex_kernel(device.type)
    raise UserError(f"{asked} is no kernel; choose triton, flash or flex")


def _triton_kernel() -> Kernel:
    from specdec.attention.triton_kernel import TreeAttention

    launch = TreeAttention()

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seen: Seen,
        scaling: float | None,
    ) -> torch.Tensor:
        return launch(
            query, key, value, lengths=seen.lengths, visible=seen.visible, scaling=scaling
        )

    return attend


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """torch's own attention with one mask.

    On CUDA none of its kernels but cuDNN's takes a mask and fewer key/value heads than query heads,
    and cuDNN plans anew for every length of the context, which takes longer than many passes. So
    there all query heads of a key/value head are rows of one head, and cuDNN is left out.

    Args:
        query: [1, H, R, D].
        key, value: [1, G, C, D].
        mask: [R, C], added to the scores, or None.
        scaling: factor of the scores; 1 / sqrt(D) where None.

    Returns:
        [1, H, R, D].
    """
    if query.device.type != "cuda":
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    with sdpa_kernel(_ANY_LENGTH):
        (_, heads, rows, _), groups = query.shape, key.shape[1]
        if mask is None or heads == groups:
            return scaled_dot_product_attention(
                query, key, value, mask, scale=scaling, enable_gqa=heads != groups
            )
        folded = query.unflatten(1, (groups, -1)).flatten(2, 3)
        found = scaled_dot_product_attention(
            folded, key, value, mask.repeat(heads // groups, 1), scale=scaling
        )
        return found.unflatten(2, (-1, rows)).flatten(1, 2)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Seen,
    scaling: float | None,
) -> torch.Tensor:
    """Two levels (PipeDec Alg. 1): flash-attn over the prefix, plain torch over the tree.

    flash-attn has no masks, which is why only the prefix is its; it splits the context by itself.
    """
    from flash_attn import flash_attn_with_kvcache

    prefix, prefix_lse = flash_attn_with_kvcache(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache_seqlens=seen.lengths[:1],
        softmax_scale=scaling,
        causal=False,
        return_softmax_lse=True,
    )
    # An empty prefix has no weight, whatever its sums and its infinite log-sum-exp are given as.
    held = seen.lengths[0] > 0
    prefix_lse = torch.where(held, prefix_lse, -torch.inf)
    prefix = torch.where(held, prefix, 0.0)
    columns = seen.lengths[0] + torch.arange(seen.visible.shape[1], device=key.device)
    columns = columns.clamp(max=key.shape[2] - 1)
    keys, values = key.index_select(2, columns), value.index_select(2, columns)
    tree, tree_lse = masked_lse(query, keys, values, seen, scaling)
    share = torch.sigmoid(tree_lse - prefix_lse.to(tree_lse.dtype)).unsqueeze(-1)
    return torch.lerp(prefix.transpose(1, 2), tree, share.to(query.dtype))


def masked_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Seen,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the tree's M columns only: [1, H, R, D] and its log-sum-exp [1, H, R]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2) * scale).float()
    columns = torch.arange(seen.visible.shape[1], device=key.device)
    open_ = seen.visible.bool() & (columns < seen.lengths[1] - seen.lengths[0])
    scores = scores.masked_fill(~open_, torch.finfo(torch.float32).min)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(query.dtype)
    return (weights @ value.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)


@cache
def _flex_kernel(device_type: str) -> Kernel:
    """torch's FlexAttention, the mask as a change of scores; compiled where that is of use."""
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it writes out all scores: right everywhere, fast nowhere.
    call: Any = None
    if device_type == "cuda":
        call = torch.compile(flex_attention, dynamic=False)
        # One code for every number of rows and every context; torch's own limit is 8.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _FLEX_SHAPES)

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seen: Seen,
        scaling: float | None,
    ) -> torch.Tensor:
        mask = seen.mask()

        def masked(score: Any, batch: Any, head: Any, row: Any, slot: Any) -> Any:  # noqa: ARG001
            return score + mask[row, slot]

        run = call or flex_attention
        grouped = query.shape[1] != key.shape[1]
        found: torch.Tensor = run(
            query, key, value, score_mod=masked, scale=scaling, enable_gqa=grouped
        )
        return found

    return attend
