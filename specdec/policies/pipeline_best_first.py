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

from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.tree_growth import (
    Stateless,
    best_leaves,
    expand,
    most_probable,
    ready_requests,
)
from specdec.types import Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState


class PipelineBestFirst(Stateless):
    """Feeds the ``width`` most probable nodes per step; drafts ``draft_passes`` times per step.

    Each draft pass, in ``overlap`` while the stages compute, expands the ``width`` most probable
    leaves: nodes that were not expanded, and candidates that were not made nodes yet.
    ``select`` then submits the ``width`` most probable nodes and candidates not yet submitted.
    Parents are submitted no later than children, because scores do not rise downwards and of equals
    the parent comes first. After a miss the fresh root goes alone, as in SpecPipe.

    One pass per step lets the tree grow by a level per step, so a step verifies one token except
    where it catches up; with two passes it may verify two on average. Hits need an executor of
    latency 2 or more.
    """

    value_dependent = True
    serial = False

    @validated
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
            waiting = np.where(tree.submitted_at < 0, tree.scores, -np.inf)
            slots = most_probable(tree, waiting, tree.scores, self.width)
            if len(slots):
                items.append((request.id, tree.ids[slots]))
        return Nodes(tuple(items))

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """The draft passes of the step, for all requests together."""
        growing = [request for request in state.requests.values() if not request.finished]
        for _ in range(self.draft_passes):
            wanted = [(r, best_leaves(r, self.width)) for r in growing]
            expand(state, source, wanted, self.children)
