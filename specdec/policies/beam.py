from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from specdec.interfaces import TokenSource, TreePolicy
from specdec.parts.fields import Count, DraftCount, expects, validated
from specdec.policies.tree_growth import as_nodes, best_unsubmitted, expand_beams, ready_requests
from specdec.state import DecodeState
from specdec.types import Nodes


@validated
@dataclass(eq=False, kw_only=True)
class BestOfBeam(TreePolicy):
    """Expands the ``width`` best nodes of each level, then submits the ``nodes`` best of all.

    EAGLE-2 (arXiv 2406.16858, section 4): the best of a level's candidates by cumulative
    probability are the next level's beam, and the best candidates of all levels, which are
    connected, are submitted. After verification the surviving tree is kept and extended; EAGLE-2
    drafts a new one.

    Args:
        nodes: nodes per target pass, including the root, at least 2 (the paper: 60).
        width: nodes expanded per level (the paper: 10).
        children: candidates per expanded node (the paper: 10).
        depth: levels expanded below the root (the paper: 7); candidates go one level deeper.
    """

    value_dependent = True

    nodes: Annotated[int, Field(ge=2), expects("it must be at least 2: root and a child")]
    width: DraftCount
    children: Count
    depth: Count

    def max_cached_nodes(self, in_flight: int) -> int:
        return self.nodes

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=True)
        spans = [(request, 0, self.depth + 1) for request in requests]
        expand_beams(state, source, spans, self.width, self.children)
        return as_nodes((r, best_unsubmitted(r.tree, self.nodes)) for r in requests)
