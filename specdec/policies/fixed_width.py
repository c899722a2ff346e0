"""A beam of fixed width, one level at a time (SpecPipe 3.3.3, PipeDec 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.tree_growth import (
    NO_SLOTS,
    Stateless,
    append_best,
    bottom_level,
    expand,
    last_position,
    open_bottom,
    ready_requests,
    unsubmitted,
)
from specdec.types import IntArray, Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState


class FixedWidth(Stateless):
    """Each level holds the ``width`` candidates of highest cumulative probability.

    A level's candidates are the ``children`` best of each node of the level above.

    *Pipelined* (``levels_per_step`` given): a step feeds so many levels. The draft forward of the
    newest level runs in ``overlap`` while the pipeline works; the choice among its candidates is
    made in the next ``select``, after the pruning of the step, which leaves more valid nodes
    (PipeDec 3.3.4). After a miss the fresh root goes alone. Where pruning has emptied the deepest
    levels, the tree goes on from the deepest level left: its candidates are known, so a partial
    refill costs no draft forward. With more than one level per step the extra levels are grown in
    ``overlap``, from the candidates known then. Hits need an executor of latency 2 or more.

    *Serial* (``levels_per_step`` None): ``depth`` levels are grown in ``select``, the tree is
    submitted whole, and nothing is fed until it is answered.

    With a source whose proposals come with ``Output.exits`` (PPSD) a level is expanded when its
    exits have arrived; until then nothing is fed. Width 1 with 1 child is PPSD's own chain. A chain
    grows in that step also where it is another request's turn: so the child stands there, or not,
    when its parent is judged, whoever shares the target (rejection verifiers draw otherwise for a
    node with a child than for one without).

    Attributes:
        value_dependent: false only for a chain, which takes candidates as they come.
        follows_exits: whether it waits for exits; the pipelined form does.
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
        """Sets the shape.

        Args:
            width: nodes per level at most (SpecPipe: 64, PipeDec: 32).
            children: candidates per node at most (16 in both).
            levels_per_step: levels fed per step; None for the serial form.
            depth: levels below the root, in the serial form only.

        Raises:
            ValueError: for a size below 1, or where not exactly one form is described.
        """
        if levels_per_step is not None and depth is not None:
            raise ValueError(
                f"policy.depth={depth} has no meaning with policy.levels_per_step="
                f"{levels_per_step}; drop it, or set policy.levels_per_step=null"
            )
        if levels_per_step is None and depth is None:
            raise ValueError(
                "policy.levels_per_step=null submits whole trees, which needs policy.depth: give"
                " the number of levels"
            )
        self.width = width
        self.children = children
        self.levels_per_step = levels_per_step
        self.depth = depth
        self.serial = levels_per_step is None
        self.follows_exits = not self.serial
        self.value_dependent = width > 1 or children > 1

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        if self.depth is not None:
            return 1 + self.depth * self.width
        return 1 + self.width * (self.levels_per_step or 1) * latency

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """The next level(s) of every request, or the whole trees of idle ones (serial form)."""
        requests = ready_requests(state, serial=self.serial)
        if self.depth is not None:
            self._grow_serially(state, source, requests, self.depth)
        else:
            growing = requests
            if source.needs.exits:
                if not self.value_dependent:
                    growing = [r for r in state.requests.values() if not r.finished]
                fed = [r for r in growing if r.tree.submitted_at[0] >= 0]
                expand(state, source, [(r, open_bottom(r)) for r in fed], self.children)
            for request in growing:
                if request.tree.submitted_at[0] >= 0 or len(request.tree) > 1:
                    self._append_level(request)
        return unsubmitted(requests)

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """Expands the newest level; grows and expands the extra levels of a multi-level step.

        During a request's prefill its root is expanded once: draft and target prefill in parallel
        (PipeDec 3.4).
        """
        if source.needs.exits:
            return  # nothing has passed the exit since ``select`` asked
        growing = [request for request in state.requests.values() if not request.finished]
        for extra in range(self.levels_per_step or 0):
            if extra:
                growing = [
                    request
                    for request in growing
                    if _fed_now(request, state.step) and len(self._append_level(request))
                ]
            expand(state, source, [(r, open_bottom(r)) for r in growing], self.children)

    def _append_level(self, request: RequestState) -> IntArray:
        """Makes a level below the deepest one; int64[<= width] slots, none if nothing is known."""
        tree = request.tree
        bottom = bottom_level(tree)
        if int(tree.positions[bottom[0]]) >= last_position(request):
            return NO_SLOTS
        return append_best(tree, bottom, self.width, self.children)

    def _grow_serially(
        self,
        state: DecodeState,
        source: TokenSource,
        requests: list[RequestState],
        depth: int,
    ) -> None:
        growing = requests
        while growing := [r for r in growing if int(r.tree.depths.max()) < depth]:
            expand(state, source, [(r, open_bottom(r)) for r in growing], self.children)
            growing = [r for r in growing if len(self._append_level(r))]


def _fed_now(request: RequestState, step: int) -> bool:
    """Whether a level below the root entered in this step or may enter in the next."""
    submitted_at = request.tree.submitted_at
    return bool(submitted_at[0] >= 0) and int(submitted_at.max()) == step
