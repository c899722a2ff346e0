"""What a draft model has stored for a request, and what a call computes of it.

Shape letters: W nodes, V vocabulary, C computed nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.sampling.transform import SamplingTransform
from specdec.types import IntArray

if TYPE_CHECKING:
    from specdec.state import RequestState


@dataclass(slots=True)
class Draft:
    """The draft's state for one request.

    Attributes:
        cache: keys and values of committed tokens and of nodes.
        transform: the request's sampling transform.
        logits: node id -> [V], for nodes computed as ancestors and not expanded yet.
    """

    cache: TreeCache
    transform: SamplingTransform
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class PassWork:
    """The part of one ``expand`` that concerns one request.

    Attributes:
        request: the request.
        draft: the draft's state for it.
        slots: int64[W], the nodes to expand, in the caller's order.
        prefix: committed tokens that are missing in the cache.
        compute: int64[C], slots to compute, in topological order.
        in_order: whether ``compute`` equals ``slots``.
    """

    request: RequestState
    draft: Draft
    slots: IntArray
    prefix: IntArray
    compute: IntArray
    in_order: bool

    def rows(self) -> Rows:
        """The missing tokens and the nodes to compute as the rows of one pass."""
        node_ids, tokens, parent_ids, positions = self.request.tree.rows_of(self.compute)
        return self.draft.cache.rows(
            prefix_tokens=self.prefix,
            node_ids=node_ids,
            node_tokens=tokens,
            # A root has no parent entry: an id that is not in the cache means the prefix's end.
            parent_ids=parent_ids,
            node_positions=positions,
        )
