"""A tree of fixed topology per target pass (SpecInfer, section 3: expansion-based trees)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.policies.growing import (
    NO_SLOTS,
    Stateless,
    check_count,
    expand,
    last_position,
    ready_requests,
    unsubmitted,
)
from specdec.tree import TokenTree
from specdec.types import IntArray, Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState


class Static(Stateless):
    """Level ``l`` takes the first ``branching[l]`` candidates of every node of the level above.

    SpecInfer's expansion configuration, by default its <1,1,3,1,1,1,1,1>. The topology does not
    depend on the candidates' values, so sampled candidates stay unbiased under rejection.
    """

    value_dependent = False
    serial = True

    def __init__(self, *, branching: Sequence[int] = (1, 1, 3, 1, 1, 1, 1, 1)) -> None:
        """Sets the topology.

        Args:
            branching: children per node, level by level from the root down.

        Raises:
            ValueError: for an empty topology or an entry below 1.
        """
        if isinstance(branching, str) or not isinstance(branching, Sequence) or not branching:
            raise ValueError(
                f"policy.branching={branching!r} must be a list of children per level with at"
                " least one entry, e.g. [1,1,3,1]; to decode without drafts use policy=root_only"
            )
        for level, children in enumerate(branching):
            check_count(f"branching[{level}]", children, remedy="shorten the list instead")
        self.branching = tuple(branching)

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Grows every idle request's tree, one source call per level, and submits all of it."""
        requests = ready_requests(state, serial=True)
        growing = [(request, np.zeros(1, np.int64)) for request in requests]
        for children in self.branching:
            growing = [
                (r, level)
                for r, level in growing
                if len(level) and int(r.tree.positions[level[0]]) < last_position(r)
            ]
            if not growing:
                break
            fresh = [(r, level[~r.tree.expanded[level]]) for r, level in growing]
            expand(state, source, fresh, children)
            growing = [(r, _next_level(r.tree, level, children)) for r, level in growing]
        return unsubmitted(requests)


def _next_level(tree: TokenTree, level: IntArray, children: int) -> IntArray:
    """int64[W]: slots of all nodes one below ``level``, made of the first candidates where new."""
    known = NO_SLOTS
    if int(level[-1]) + 1 < len(tree):  # part of a tree survived a commit
        known = np.flatnonzero(np.isin(tree.parents, level))
    rows, columns = np.nonzero(tree.candidate_logprobs[level, :children] > -np.inf)
    made = tree.take(level.take(rows), columns)
    return np.concatenate([known, made]) if len(known) else made
