"""SpecPipe-DB: SpecPipe for many requests (arXiv 2504.04104 v2, 3.4, section 4, 4.4).

The levels of all requests form one ragged batch per step; a miss empties the tree of its own
request only. Keys and values are in blocks (PagedAttention), and new requests enter as soon as
blocks are free (vLLM's prefill priority). Deviation: ``shared_width`` (preset
``specpipe_db_adaptive``) narrows the levels as the batch grows, by the cost of a step.
"""

from __future__ import annotations

from strategies.specpipe_db.adaptive_width import AdaptiveWidth

__all__ = ["AdaptiveWidth"]
