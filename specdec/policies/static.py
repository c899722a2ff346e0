"""A tree of fixed topology per target pass (SpecInfer, section 3: expansion-based trees)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from copy import copy
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import numpy as np

from specdec.clocks import SimulatedClock
from specdec.parts.fields import Count, validated
from specdec.policies.tree_growth import (
    NO_SLOTS,
    expand,
    last_position,
    ready_requests,
    unsubmitted,
)
from specdec.tree import TokenTree
from specdec.types import Commit, IntArray, Nodes, Output

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState


class DraftOverlap(StrEnum):
    """When a tree is drafted that can only be known once the tree before it has been answered.

    ``NONE``: after that answer, while the target waits: fully serial.
    ``RULE``: ahead, under guesses of the answer. While a tree is verified, one draft pass per step
    of the target grows the next tree under each of the ``guesses`` most probable next roots, the
    candidates of the submitted tree that it does not hold. If the answer ends in one of them, what
    has been drafted is hidden and only what is missing is drafted serially; otherwise all of it is.
    ``FULL``: a limit that no machine reaches: as if the answer were guessed always. Drafting then
    takes no time as long as it is shorter than the verification before it.
    """

    NONE = "none"
    RULE = "rule"
    FULL = "full"


class Static:
    """Level ``l`` takes the first ``branching[l]`` candidates of every node of the level above.

    SpecInfer's expansion configuration, by default its <1,1,3,1,1,1,1,1>. The topology does not
    depend on the candidates' values, so sampled candidates stay unbiased under rejection; only
    drafting ahead chooses by value, and is refused there.
    """

    serial = True

    @validated
    def __init__(
        self,
        *,
        branching: Sequence[Count] = (1, 1, 3, 1, 1, 1, 1, 1),
        draft_overlap: Literal["none", "rule", "full"] = "none",
        guesses: Count = 20,
    ) -> None:
        """Sets the topology and when it is drafted.

        Args:
            branching: children per node, level by level from the root down.
            draft_overlap: none, rule or full; see ``DraftOverlap``.
            guesses: next roots that the rule drafts under.

        Raises:
            ValueError: for an empty topology, an entry below 1 or an unknown overlap.
        """
        if not branching:
            raise ValueError(
                f"policy.branching={branching!r} must be a list of children per level with at"
                " least one entry, e.g. [1,1,3,1]; to decode without drafts use policy=root_only"
            )
        self.branching = tuple(branching)
        self.draft_overlap = DraftOverlap(draft_overlap)
        self.guesses = guesses
        self.value_dependent = self.draft_overlap is DraftOverlap.RULE
        self._ahead: dict[int, tuple[int, IntArray]] = {}  # request -> (level, its node ids)
        self._fed_s: dict[int, float] = {}  # request -> when its last tree was submitted
        self._complete: set[int] = set()  # requests whose tree has nothing left to draft

    def open(self, request: RequestState) -> None:
        """Nothing to prepare."""

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        return 1 + sum(itertools.accumulate(self.branching, operator.mul))

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Grows every idle request's tree, one source call per level, and submits all of it."""
        requests = ready_requests(state, serial=True)
        if self.draft_overlap is DraftOverlap.FULL:
            self._grow_hidden(state, source, requests)
        else:
            self._grow(state, source, requests)
        return unsubmitted(requests)

    def prepared(self, request: RequestState) -> bool:
        """Whether a turn would be used at once; if not, drafting goes on beside other requests."""
        return request.id in self._complete

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """Drafts for requests that wait for their turn, while others are verified; the rule's pass.

        Where turns are given (``serving.feeding``) a tree is drafted in the time that the target
        works for other requests, as far as that goes.
        """
        if state.turn is not None and self.draft_overlap is not DraftOverlap.FULL:
            queue = [
                request
                for request in state.requests.values()
                if request.prefill_sent >= request.num_prefill
                and not request.finished
                and not request.awaiting
            ]
            self._grow(state, source, queue, stop=ready)
        if self.draft_overlap is not DraftOverlap.RULE:
            return
        waiting = [r for r in state.requests.values() if r.awaiting and not r.finished]
        levels = [(r, *self._next_ahead(r)) for r in waiting]
        # Level -1: the submitted tree's own leaves, whose candidates are next roots as well.
        fresh = [(r, _open_slots(r, slots)) for r, _, slots in levels]
        expand(state, source, fresh, max(self.branching) + self.guesses)
        for request, level, slots in levels:
            if level < 0:
                parents, columns, _ = request.tree.best_candidates(self.guesses)
                made = request.tree.take(parents, columns)
            else:
                made = _next_level(request.tree, slots, self.branching[level])
            self._ahead[request.id] = (level + 1, request.tree.ids[made])

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Ends the guessing about requests that were answered."""
        for commit in commits:
            self._ahead.pop(commit.request, None)
            self._complete.discard(commit.request)

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._ahead.pop(request_id, None)
        self._complete.discard(request_id)
        self._fed_s.pop(request_id, None)

    def _next_ahead(self, request: RequestState) -> tuple[int, IntArray]:
        """(level, its slots) that the rule expands next; no slots where the trees are complete."""
        if request.id not in self._ahead:
            return -1, np.arange(len(request.tree))
        level, ids = self._ahead[request.id]
        if level == len(self.branching):
            return level - 1, NO_SLOTS
        return level, request.tree.slots(ids)

    def _grow(
        self,
        state: DecodeState,
        source: TokenSource,
        requests: Sequence[RequestState],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Completes the trees of the requests, or drafts level by level as long as not ``stop``."""
        growing = [(request, np.zeros(1, np.int64)) for request in requests]
        spare = self.guesses if self.draft_overlap is DraftOverlap.RULE else 0
        for children in self.branching:
            growing = [
                (r, level)
                for r, level in growing
                if len(level) and int(r.tree.positions[level[0]]) < last_position(r)
            ]
            if not growing:
                break
            if stop():
                return
            fresh = [(r, level[~r.tree.expanded[level]]) for r, level in growing]
            expand(state, source, fresh, children + spare)
            growing = [(r, _next_level(r.tree, level, children)) for r, level in growing]
        self._complete.update(request.id for request in requests)

    def _grow_hidden(
        self, state: DecodeState, source: TokenSource, requests: Sequence[RequestState]
    ) -> None:
        """As if drafting had begun with the verification of the tree before."""
        if not requests:
            return
        clock = state.clock
        assert isinstance(clock, SimulatedClock), "draft_overlap=full is checked when composed"
        beside = copy(state)
        beside.clock = SimulatedClock(clock.profile, scale=clock.scale)
        self._grow(beside, source, requests)
        now = clock.now()
        began = max(self._fed_s.get(r.id, now) for r in requests)
        took = beside.clock.now()
        clock.drafted.add(began_s=began, seconds=took, target_done_s=now)
        clock.wait_until(began + took)
        self._fed_s.update((request.id, clock.now()) for request in requests)


def _open_slots(request: RequestState, slots: IntArray) -> IntArray:
    """int64[<= W]: those of some nodes that are not expanded and may have children."""
    tree = request.tree
    wanted = ~tree.expanded[slots] & (tree.positions[slots] < last_position(request))
    return slots[wanted]


def _next_level(tree: TokenTree, level: IntArray, children: int) -> IntArray:
    """int64[W]: slots of all nodes one below ``level``, made of the first candidates where new."""
    known = NO_SLOTS
    if len(level) and int(level[-1]) + 1 < len(tree):  # part of a tree survived a commit
        known = np.flatnonzero(np.isin(tree.parents, level))
    rows, columns = np.nonzero(tree.candidate_logprobs[level, :children] > -np.inf)
    made = tree.take(level.take(rows), columns)
    return np.concatenate([known, made]) if len(known) else made
