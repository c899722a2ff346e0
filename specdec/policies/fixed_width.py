from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.tree_growth import (
    append_best,
    expand,
    growable_level,
    live_requests,
    open_bottom,
    ready_requests,
    unsubmitted,
)
from specdec.types import IntArray, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class FixedWidth(TreePolicy):
    """Gives each level the ``width`` candidates of highest cumulative probability.

    The candidates of a level are the ``children`` best of each node of the level above (SpecPipe
    3.3.3, PipeDec 3.3).

    *Pipelined form* (``levels_per_step`` set): each step submits that many levels. The draft
    forward of the newest level runs in ``overlap`` while the pipeline computes. Its candidates are
    selected in the next ``select``, after the step's pruning, which leaves more valid nodes
    (PipeDec 3.3.4). If pruning empties the deepest levels, growth continues at the deepest
    remaining level, whose candidates are stored. Additional levels of a step are grown in
    ``overlap`` from the candidates known then. Hits need an executor of latency 2 or more.

    *Serial form* (``levels_per_step`` None): ``select`` grows ``depth`` levels and submits the tree
    whole. Nothing more is submitted until it is answered.

    With a source that proposes through ``Output.exits`` (PPSD), a level is expanded once its exits
    have arrived. Width 1 with 1 child is PPSD's own chain. Such a chain also grows in the turns of
    other requests: rejection verifiers draw differently for a node with and without children, so
    whether a node has a child when it is tested must not depend on the batch.

    Args:
        width: maximum number of nodes per level (SpecPipe: 64, PipeDec: 32).
        children: maximum number of candidates per node (16 in both papers).
        levels_per_step: levels submitted per step; None selects the serial form.
        depth: levels below the root; serial form only.
    """

    @validated
    def __init__(
        self,
        *,
        width: DraftCount,
        children: Count,
        levels_per_step: Count | None = 1,
        depth: Count | None = None,
    ) -> None:
        if levels_per_step is not None and depth is not None:
            raise ValueError(
                f"policy.depth={depth} has no effect with policy.levels_per_step="
                f"{levels_per_step}; remove it, or set policy.levels_per_step=null"
            )
        if levels_per_step is None and depth is None:
            raise ValueError(
                "policy.levels_per_step=null submits whole trees and needs policy.depth; set it"
                " to the number of levels"
            )
        self.width = width
        self.children = children
        self.levels_per_step = levels_per_step
        self.depth = depth
        self.serial = levels_per_step is None
        self.follows_exits = not self.serial
        self.value_dependent = width > 1 or children > 1

    def max_cached_nodes(self, in_flight: int) -> int:
        if self.depth is not None:
            return 1 + self.depth * self.width
        return 1 + self.width * (self.levels_per_step or 1) * in_flight

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=self.serial)
        if self.depth is not None:
            growing = requests
            while growing := [r for r in growing if int(r.tree.depths.max()) < self.depth]:
                expand(state, source, [(r, open_bottom(r)) for r in growing], self.children)
                growing = [r for r in growing if len(self._append_level(r))]
            return unsubmitted(requests)
        growing = requests
        if source.needs.exits:
            if not self.value_dependent:
                growing = live_requests(state)
            submitted = [r for r in growing if r.tree.submitted_at[0] >= 0]
            expand(state, source, [(r, open_bottom(r)) for r in submitted], self.children)
        for request in growing:
            if request.tree.submitted_at[0] >= 0 or len(request.tree) > 1:
                self._append_level(request)
        return unsubmitted(requests)

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        """Expands the newest level, and grows the additional levels of a multi-level step.

        A root is expanded during its request's prefill, so that both models' prefills run in
        parallel (PipeDec 3.4).
        """
        if source.needs.exits:
            return False  # no node has passed the exit since ``select``
        growing = live_requests(state)
        for extra in range(self.levels_per_step or 0):
            if extra:
                growing = [
                    request
                    for request in growing
                    if _submitting(request, state.step) and len(self._append_level(request))
                ]
            expand(state, source, [(r, open_bottom(r)) for r in growing], self.children)
        return False

    def _append_level(self, request: RequestState) -> IntArray:
        """Adds a level below the deepest one; returns its slots, int64[<= width], maybe none."""
        return append_best(request.tree, growable_level(request), self.width, self.children)


def _submitting(request: RequestState, step: int) -> bool:
    """Whether the root and the newest submitted level allow a further level in this step."""
    submitted_at = request.tree.submitted_at
    return bool(submitted_at[0] >= 0) and int(submitted_at.max()) == step
