"""Reference implementations of the kernels in plain torch, in the precision of their inputs.

Shape letters: H query heads, G key/value heads, D head size, R rows, C cache slots, M columns of
the mask, E hidden size, F inner size of a feed-forward block, N outputs of a projection.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    first: int,
    end: int,
    visible: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """Attention of rows to a prefix that all rows see and to a masked tree.

    Args:
        query: [1, H, R, D].
        key, value: [1, G, C, D]; slots from ``end`` on are not read.
        first: every row sees the slots before this one.
        end: first <= end <= C.
        visible: bool or uint8 [R, M], M >= end - first: which slots from ``first`` on a row sees.
            It need not be square (SwiftSpec 3.1).
        scaling: factor of the scores; 1 / sqrt(D) where None.

    Returns:
        [1, H, R, D]; zeros for a row that sees no slot.
    """
    grouped = rearrange(query, "b (g p) r d -> b g p r d", g=key.shape[1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = einsum(grouped, key[:, :, :end], "b g p r d, b g c d -> b g p r c") * scale
    seen = torch.ones(query.shape[2], end, dtype=torch.bool, device=query.device)
    seen[:, first:] = visible[:, : end - first].bool()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    output = einsum(weights, value[:, :, :end], "b g p r c, b g c d -> b g p r d")
    return rearrange(output, "b g p r d -> b (g p) r d")


def swiglu(hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(hidden gate^T) * (hidden up^T) (SwiftSpec 3.3, without its biases).

    Args:
        hidden: [R, E].
        gate, up: [F, E], the layout of ``nn.Linear``.

    Returns:
        [R, F].
    """
    return torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)


def norm_projection(
    hidden: torch.Tensor, weight: torch.Tensor, matrices: list[torch.Tensor], eps: float
) -> torch.Tensor:
    """Root-mean-square norm, then one or more projections, concatenated.

    Args:
        hidden: [R, E].
        weight: [E], of the norm.
        matrices: [N_i, E] each.
        eps: of the norm.

    Returns:
        [R, sum N_i].
    """
    normed = torch.rms_norm(hidden, weight.shape, weight, eps)
    return torch.cat([normed @ matrix.T for matrix in matrices], -1)
