"""The most probable nodes at every step of a pipeline, whatever their level (``specpipe_bf``).

Beyond SpecPipe and PipeDec, which feed whole levels. A step's budget is that of a level, ``width``
nodes. It goes to the most probable nodes that the pipeline has not been given: the next level, late
siblings where pruning has left the tree thin, or several levels of a path that the draft is sure
of. Each token of the target's path is submitted once, so the expected tokens per step are the
probability mass submitted per step, which this choice makes the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from specdec.bounds import Count, DraftCount, bounded
from specdec.policies.growing import (
    Stateless,
    expand,
    last_position,
    most_probable,
    ready_requests,
)
from specdec.tree import TokenTree
from specdec.types import BoolArray, IntArray, Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState


class PipelineBestFirst(Stateless):
    """Feeds the ``width`` most probable nodes per step; drafts ``draft_passes`` times per step.

    A *leaf* is a node that was not expanded, or a candidate that was not made a node yet. Each
    draft pass, in ``overlap`` while the stages compute, expands the ``width`` most probable leaves.
    ``select`` then submits the ``width`` most probable nodes and candidates not yet submitted.
    Parents are submitted no later than children, because scores do not rise downwards and of equals
    the parent comes first. After a miss the fresh root goes alone, as in SpecPipe.

    One pass per step lets the tree grow by a level per step, so a step verifies one token except
    where it catches up; with two passes it may verify two on average. Hits need an executor of
    latency 2 or more.
    """

    value_dependent = True
    serial = False

    @bounded
    def __init__(
        self,
        *,
        width: DraftCount,
        children: Count,
        draft_passes: Count = 2,
    ) -> None:
        """Sets the budgets of a step.

        Args:
            width: nodes submitted per step, and leaves expanded per draft pass, at most.
            children: candidates asked of the source per node.
            draft_passes: draft passes per step.

        Raises:
            ValueError: for a size below 1.
        """
        self.width = width
        self.children = children
        self.draft_passes = draft_passes

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        return 1 + self.width * latency

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """The most probable unsubmitted nodes of every request."""
        items = []
        for request in ready_requests(state, serial=False):
            tree = request.tree
            slots = _chosen(tree, tree.submitted_at < 0, self.width)
            if len(slots):
                items.append((request.id, tree.ids[slots]))
        return Nodes(tuple(items))

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """The draft passes of the step, for all requests together."""
        growing = [request for request in state.requests.values() if not request.finished]
        for _ in range(self.draft_passes):
            expand(state, source, [(r, self._leaves(r)) for r in growing], self.children)

    def _leaves(self, request: RequestState) -> IntArray:
        """int64[<= width]: slots of the most probable leaves, made nodes where need be.

        Those at the last token that the request can emit are left out: nothing may follow them.
        """
        tree, last = request.tree, last_position(request)
        leaves = _chosen(tree, ~tree.expanded & (tree.positions < last), self.width)
        return leaves[tree.positions.take(leaves) < last]


def _chosen(tree: TokenTree, waiting: BoolArray, num: int) -> IntArray:
    """int64[<= num]: the most probable of the ``waiting`` nodes, bool[N], and of all candidates."""
    return most_probable(tree, np.where(waiting, tree.scores, -np.inf), tree.scores, num)
