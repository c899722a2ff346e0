"""What the kernels compute, by torch's own operations."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu


def tree_attention(query, key, value, *, first, end, visible, scaling=None):
    """Attention to the slots before ``first``, which all rows see, and to a masked tree.

    ``visible`` [R, M >= end - first]: which slots from ``first`` on a row sees; those from ``end``
    on are not read. Zeros for a row that sees no slot.
    """
    seen = torch.ones(query.shape[2], end, dtype=torch.bool, device=query.device)
    seen[:, first:] = visible[:, : end - first].bool()
    stored = key[:, :, :end], value[:, :, :end]
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(query, *stored, seen, scale=scaling, enable_gqa=True)


def swiglu(hidden, gate, up):
    """silu(hidden gate^T) * (hidden up^T) (SwiftSpec 3.3, without its biases)."""
    return silu(hidden @ gate.T) * (hidden @ up.T)
