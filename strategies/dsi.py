"""DSI (arXiv 2405.14105): copies of the target verify blocks of one chain at the same time.

A copy of the target verifies each block of tokens as soon as it is drafted, whether the blocks
before it are verified or not. A rejection prunes all later blocks; copies that verify them finish,
and their answers are dropped.
"""

import numpy as np

from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.free_draft import Chain, FreeDraft
from specdec.policies.tree_growth import ready_requests
from specdec.state import DecodeState
from specdec.types import IntArray


class Blocks(FreeDraft):
    """Submits every block of ``lookahead`` draft tokens when it is drafted, and every new root.

    A request's chain has at most ``in_flight`` + 1 blocks: one per copy of the target, plus one.

    Args:
        lookahead: draft tokens per block.
        in_flight: number of batches that the target processes at the same time.
    """

    feeds_busy_target = True

    @validated
    def __init__(self, *, lookahead: DraftCount, in_flight: Count = 1) -> None:
        super().__init__(lookahead * (in_flight + 1))
        self.lookahead = lookahead

    def can_submit(self, state: DecodeState) -> bool:
        requests = ready_requests(state, serial=False)
        return any(len(self.for_target(self.chains[r.id])) for r in requests)

    def for_target(self, chain: Chain) -> IntArray:
        """Returns int64[W]: slots of the nodes to submit, a new root and complete blocks."""
        waiting = np.flatnonzero(chain.request.tree.submitted_at < 0)
        num_roots = int(len(waiting) > 0 and waiting[0] == 0)  # it does not wait for a block
        rest = len(waiting) - num_roots
        if len(chain.work(0)):  # the last block of a chain that has ended may be shorter
            rest -= rest % self.lookahead
        return waiting[: num_roots + rest]
