"""FlowSpec (arXiv 2507.02620): a drafted tree enters a pipeline in segments, best first.

A round begins with a tree that is drafted whole (EAGLE-2's beam) and cut into segments in order of
score. One segment enters the pipeline per step, and is verified when it leaves: the nodes that
contradict the result are dropped everywhere. While the stages compute, the draft grows a tree at
the new root, which is merged with the rest of the old one. A step without a result deepens the tree
instead. The round ends when the committed token is not in the tree.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import Count, DraftCount, Index, expects, validated
from specdec.policies.tree_growth import (
    NO_SLOTS,
    as_nodes,
    expand_beams,
    live_requests,
    most_probable,
    ready_requests,
)
from specdec.sampling.transform import top_set
from specdec.state import DecodeState, RequestState
from specdec.types import Commit, CommitKind, IntArray, Nodes, Output

NodeCount = Annotated[int, Field(ge=2), expects("it must be at least 2: root and a child")]


@dataclass(slots=True)
class _DraftRound:
    """The state of one request's tree in a round.

    Attributes:
        chosen: int64[C], ids of the nodes to submit, in increasing order.
        levels: number of levels below the root that are drafted; 0 if the root is new.
        judged: whether a commit has decided about a segment since the round began.
    """

    chosen: IntArray = field(default_factory=lambda: NO_SLOTS)
    levels: int = 0
    judged: bool = False


@validated
@dataclass(eq=False, kw_only=True)
class FlowSpec(TreePolicy):
    """Submits the best nodes of a tree to a pipeline in segments, and grows it after every commit.

    A draft of L levels expands the ``width`` best nodes of each level from the root down; nodes
    that were expanded before cost no draft pass. Of all nodes and candidates the best by cumulative
    probability are then *chosen*; earlier choices stay. ``select`` submits the best chosen nodes
    that were not submitted, so a parent is never submitted after its child.

    Args:
        nodes: number of nodes of a round's first tree, including the root.
        segment: nodes submitted per step until the round's first commit.
        width: nodes expanded per level.
        children: candidates per expanded node.
        depth: levels expanded below the root.
        grown_nodes: number of nodes of the tree that is grown at each new root.
        grown_segment: nodes submitted per step after the first commit. Default: all chosen nodes.
        idle_depth: levels that are added below the tree in a step without a commit.
    """

    value_dependent = True
    serial = False

    nodes: NodeCount
    segment: DraftCount
    width: DraftCount
    children: Count
    depth: Count
    grown_nodes: NodeCount
    grown_segment: DraftCount | None = None
    idle_depth: Index = 1

    def __post_init__(self) -> None:
        self._later_segment = self.grown_segment or max(self.nodes, self.grown_nodes)
        self._rounds: defaultdict[int, _DraftRound] = defaultdict(_DraftRound)

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + max(self.segment, self._later_segment) * in_flight

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=False)
        new = [r for r in requests if r.tree.submitted_at[0] < 0 and not r.tree.expanded[0]]
        self._draft(state, source, [(r, 0, self.depth + 1) for r in new])
        return as_nodes((r, self._segment(r)) for r in requests)

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        spans = []
        for request in live_requests(state):
            if request.tree.submitted_at[0] >= 0:
                levels = self._rounds[request.id].levels
                span = (0, self.depth + 1) if not levels else (levels, levels + self.idle_depth)
                spans.append((request, *span))
        self._draft(state, source, spans)
        return False

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Keeps the chosen nodes that survive; after a miss a new round begins."""
        for commit in commits:
            ended = commit.kind is CommitKind.MISS
            past = self._rounds[commit.request]
            chosen = NO_SLOTS if ended else past.chosen[np.isin(past.chosen, commit.kept_ids)]
            self._rounds[commit.request] = _DraftRound(chosen=chosen, judged=not ended)

    def close(self, request_id: int) -> None:
        self._rounds.pop(request_id, None)

    def _draft(
        self,
        state: DecodeState,
        source: TokenSource,
        spans: Sequence[tuple[RequestState, int, int]],
    ) -> None:
        """Expands levels first .. last - 1 for each (request, first, last), then chooses nodes."""
        expand_beams(state, source, spans, self.width, self.children)
        for request, _, last in spans:
            now, tree = self._rounds[request.id], request.tree
            num = self.grown_nodes if now.judged else self.nodes
            best = most_probable(tree, tree.scores, tree.scores, num)
            now.chosen = np.union1d(now.chosen, tree.ids[best])
            now.levels = last

    def _segment(self, request: RequestState) -> IntArray:
        """Returns the slots of the best chosen nodes that were not submitted, parents first."""
        tree, now = request.tree, self._rounds[request.id]
        waits = np.isin(tree.ids, now.chosen) & (tree.submitted_at < 0)
        waits[0] = tree.submitted_at[0] < 0
        slots = np.flatnonzero(waits)
        num = self._later_segment if now.judged else self.segment
        return slots[top_set(tree.scores[slots], num)]
