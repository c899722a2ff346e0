"""SpecPipe-DB: SpecPipe for many requests (arXiv 2504.04104 v2, 3.4, section 4, 4.4).

The levels of all requests form one ragged batch per step; a miss empties only its own request's
tree. Keys and values are in blocks (PagedAttention), and new requests enter as soon as blocks are
free (vLLM's prefill priority). The preset ``specpipe_db_adaptive`` deviates: it narrows the levels
as the batch grows.
"""

from __future__ import annotations

from strategies.specpipe_db.adaptive_width import AdaptiveWidth

__all__ = ["AdaptiveWidth"]
