"""A beam that drafts, and the best of all its candidates for the target (EAGLE-2, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specdec.interfaces import TokenSource, TreePolicy
from specdec.parts.fields import Count, DraftCount, expects, validated
from specdec.policies.tree_growth import (
    as_nodes,
    best_of_level,
    best_unsubmitted,
    expand,
    ready_requests,
)
from specdec.types import Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState


class BestOfBeam(TreePolicy):
    """Expands the ``width`` best nodes of each level, then submits the ``nodes`` best of all.

    EAGLE-2 (arXiv 2406.16858): the expansion phase takes ``children`` candidates of each node of
    the beam, whose best by cumulative probability are the next level's beam; the reranking phase
    selects among all candidates of all levels. They are connected, since a child's probability is
    at most its parent's. It is a ``BestFirst`` whose expansions are bounded by level.

    The tree that survives a verdict is kept, and grown where it lacks levels; EAGLE-2 drafts
    anew.
    """

    value_dependent = True

    @validated
    def __init__(
        self,
        *,
        nodes: Annotated[int, Field(ge=2), expects("it must be at least 2: root and a child")],
        width: DraftCount,
        children: Count,
        depth: Count,
    ) -> None:
        """Sets the sizes.

        Args:
            nodes: nodes per target pass, root included, at least 2 (the paper: 60).
            width: nodes expanded per level (the paper: 10).
            children: candidates per expanded node (the paper: 10).
            depth: levels expanded below the root (the paper: 7); candidates go one level deeper.
        """
        self.nodes = nodes
        self.width = width
        self.children = children
        self.depth = depth

    def held_nodes(self, in_flight: int) -> int:
        return self.nodes

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """The best nodes of every ready request; one source call per level."""
        requests = ready_requests(state, serial=True)
        for level in range(self.depth + 1):
            beams = [(r, best_of_level(r, level, self.width)) for r in requests]
            open_ = [(r, slots[~r.tree.expanded[slots]]) for r, slots in beams]
            expand(state, source, open_, self.children)
        return as_nodes((r, best_unsubmitted(r.tree, self.nodes)) for r in requests)
