"""DSI (arXiv 2405.14105): copies of the target verify blocks of one chain at the same time.

A copy of the target verifies each block of tokens as soon as it is drafted, whether the blocks
before it are verified or not. A rejection prunes all later blocks; copies that verify them finish,
and their answers are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.free_draft import FreeDraft
from specdec.policies.tree_growth import as_nodes, ready_requests
from specdec.types import Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState
    from specdec.types import IntArray


class Blocks(FreeDraft):
    """Submits every block of ``lookahead`` draft tokens when it is drafted, and every new root.

    The chain of a request has at most one block for each copy of the target, and the next one.

    Args:
        lookahead: draft tokens per block.
        in_flight: number of batches that the target processes at the same time.
    """

    feeds_busy_target = True

    @validated
    def __init__(self, *, lookahead: DraftCount, in_flight: Count = 1) -> None:
        super().__init__(lookahead * (in_flight + 1))
        self.lookahead = lookahead

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=False)
        return as_nodes((request, self._complete(request)) for request in requests)

    def can_submit(self, state: DecodeState) -> bool:
        return any(len(self._complete(r)) for r in ready_requests(state, serial=False))

    def _complete(self, request: RequestState) -> IntArray:
        """Returns int64[W]: slots of the unsubmitted root and complete blocks."""
        waiting = np.flatnonzero(request.tree.submitted_at < 0)
        if len(waiting) and waiting[0] == 0:  # a new root does not wait for a block below it
            rest = len(waiting) - 1
            return waiting[: 1 + self._whole(request, rest)]
        return waiting[: self._whole(request, len(waiting))]

    def _whole(self, request: RequestState, num: int) -> int:
        """Returns how many of ``num`` tokens are in complete blocks; the last may be shorter."""
        return num - num % self.lookahead if self.can_draft(request) else num
