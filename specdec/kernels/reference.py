"""The kernels' references in plain torch: short, obvious, in the precision of their inputs.

Letters: H query heads, G key/value heads, D head size, R rows, C slots of a cache, M columns of
the mask, E hidden size, F inner size of a feed-forward block, N outputs of a projection.
"""

from __future__ import annotations

import torch


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
    """Attention of rows over a prefix, which all see, and a tree, of which each sees a part.

    Args:
        query: [1, H, R, D].
        key, value: [1, G, C, D]; slots from ``end`` on are not looked at.
        first: slots before this one are seen by every row.
        end: first <= end <= C.
        visible: bool or uint8 [R, M], M >= end - first: which slots from ``first`` on a row sees.
            Need not be square (SwiftSpec 3.1).
        scaling: factor of the scores; 1 / sqrt(D) where None.

    Returns:
        [1, H, R, D]; zeros where a row sees nothing.
    """
    groups = key.shape[1]
    grouped = query.unflatten(1, (groups, -1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = grouped @ key[:, :, None, :end].transpose(-1, -2) * scale
    rows = query.shape[2]
    seen = torch.ones(rows, end, dtype=torch.bool, device=query.device)
    seen[:, first:] = visible[:, : end - first].bool()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value[:, :, None, :end]).flatten(1, 2)


def swiglu(hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(hidden gate^T) * (hidden up^T) (SwiftSpec 3.3, without its biases).

    Args:
        hidden: [R, E].
        gate, up: [F, E], as ``nn.Linear`` keeps them.

    Returns:
        [R, F].
    """
    return torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)


def norm_projection(
    hidden: torch.Tensor, weight: torch.Tensor, matrices: list[torch.Tensor], eps: float
) -> torch.Tensor:
    """Root-mean-square norm, then one or several projections side by side.

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
