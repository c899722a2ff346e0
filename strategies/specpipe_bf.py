"""SpecPipe that submits its most probable nodes first, an extension that is not in the paper."""

from dataclasses import dataclass

from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.tree_growth import (
    as_nodes,
    best_leaves,
    best_unsubmitted,
    expand,
    live_requests,
    ready_requests,
)
from specdec.state import DecodeState
from specdec.types import Nodes


@validated
@dataclass(eq=False, kw_only=True)
class PipelineBestFirst(TreePolicy):
    """Submits the ``width`` most probable unsubmitted nodes per step, whatever their level.

    SpecPipe and PipeDec submit whole levels. Each token of the target's path is submitted once, so
    the expected number of tokens per step is the probability mass submitted per step, which this
    selection maximizes.

    In each step, ``draft_passes`` draft passes run in ``overlap`` while the stages compute, each of
    which expands the ``width`` most probable leaves (``best_leaves``). A parent is submitted no
    later than its children: its score is at least theirs, and ties go to the parent. After a miss
    the new root is submitted alone, as in SpecPipe. One pass per step adds one level per step, so a
    step verifies one token unless it catches up; with two passes it can verify two on average. Hits
    need an executor of latency 2 or more.

    Args:
        width: maximum number of nodes submitted per step, and of leaves expanded per pass.
        children: maximum number of candidates per node.
    """

    value_dependent = True
    serial = False

    width: DraftCount
    children: Count
    draft_passes: Count = 2

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.width * in_flight

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=False)
        return as_nodes((r, best_unsubmitted(r.tree, self.width)) for r in requests)

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        requests = live_requests(state)
        for _ in range(self.draft_passes):
            leaves = [(r, best_leaves(r, self.width)) for r in requests]
            expand(state, source, leaves, self.children)
        return False
