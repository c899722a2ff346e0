import itertools
import operator
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specdec.clocks import Clock, SimulatedClock
from specdec.errors import UserError
from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import Count, validated
from specdec.policies.tree_growth import (
    NO_SLOTS,
    expand,
    last_position,
    live_requests,
    most_probable,
    ready_requests,
    unsubmitted,
)
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import Commit, IntArray, Nodes, Output


@validated
@dataclass(eq=False, kw_only=True)
class Static(TreePolicy):
    """Builds trees of a fixed shape: each node at depth ``d`` has ``branching[d]`` children.

    A node's children are its first candidates. This is SpecInfer's expansion configuration (section
    3); the default is its <1,1,3,1,1,1,1,1>. The topology does not depend on the candidates'
    values, so sampled candidates stay unbiased under rejection. ``draft_overlap`` sets when the
    tree after the one under verification is drafted:

    *none*: after the answer, while the target waits.

    *rule*: ahead of the answer. While a tree is verified, one draft pass per target step grows the
    next tree below each of the ``guesses`` most probable next roots, which are candidates outside
    the submitted tree. If the answer leads to one of them, only the rest of its tree is drafted
    after the answer. Rejection verifiers cannot be used, since roots are selected by value.

    *full*: during the verification, as if the next root were known: a bound that no method reaches.

    Args:
        branching: children per node, level by level from the root down; not empty.
    """

    branching: Sequence[Count] = (1, 1, 3, 1, 1, 1, 1, 1)
    draft_overlap: Literal["none", "rule", "full"] = "none"
    guesses: Count = 20

    def __post_init__(self) -> None:
        if not self.branching:
            raise ValueError(
                f"policy.branching={self.branching!r} must list the children per level, with at"
                " least one entry, e.g. [1,1,3,1]; to decode without drafts use policy=root_only"
            )
        self.branching = tuple(self.branching)
        self.value_dependent = self.draft_overlap == "rule"
        self._ahead: dict[int, tuple[int, IntArray]] = {}  # request -> (level, its node ids)
        self._submitted_s: dict[int, float] = {}  # request -> when its last tree was submitted
        self._complete: set[int] = set()  # requests whose tree is completely drafted

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + sum(itertools.accumulate(self.branching, operator.mul))

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=True)
        if self.draft_overlap == "full":
            self._grow_hidden(state, source, requests)
        else:
            self._grow(state, source, requests)
        return unsubmitted(requests)

    drafts_waiting = True

    def prepared(self, request: RequestState) -> bool:
        return request.id in self._complete

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        """If requests submit in turns, drafts the trees of those not in turn until the target is
        ready. With ``draft_overlap`` "rule", also makes one pass for the guessed next trees.
        """
        live = live_requests(state)
        if state.turn is not None and self.draft_overlap != "full":
            waiting = [
                r
                for r in live
                if r.id not in self._complete and r.prefill_sent >= r.num_prefill and not r.awaiting
            ]
            self._grow(state, source, waiting, stop=events.ready)
        if self.draft_overlap != "rule":
            return False
        levels = [(r, *self._next_ahead(r)) for r in live if r.awaiting]
        # Level -1: the nodes of the submitted tree, whose candidates are next roots.
        room = [(r, s[r.tree.positions[s] < last_position(r)]) for r, _, s in levels]
        expand(state, source, room, max(self.branching) + self.guesses)
        for request, level, slots in levels:
            if level < 0:
                tree = request.tree
                no_nodes = np.full(len(tree), -np.inf)
                children = most_probable(tree, no_nodes, tree.scores, self.guesses)
            else:
                children = _next_level(request.tree, slots, self.branching[level])
            self._ahead[request.id] = (level + 1, request.tree.ids[children])
        return False

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            self._ahead.pop(commit.request, None)
            self._complete.discard(commit.request)

    def close(self, request_id: int) -> None:
        self._ahead.pop(request_id, None)
        self._complete.discard(request_id)
        self._submitted_s.pop(request_id, None)

    def _next_ahead(self, request: RequestState) -> tuple[int, IntArray]:
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
        """Drafts the requests' trees level by level, until complete or ``stop`` returns true."""
        growing = [(request, np.zeros(1, np.int64)) for request in requests]
        spare = self.guesses if self.draft_overlap == "rule" else 0
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
            expand(state, source, growing, children + spare)
            growing = [(r, _next_level(r.tree, level, children)) for r, level in growing]
        self._complete.update(request.id for request in requests)

    def check_clock(self, clock: Clock) -> None:
        if self.draft_overlap == "full" and not isinstance(clock, SimulatedClock):
            raise UserError(
                "draft_overlap=full hides all drafting, which only clock=simulated can do; use"
                " draft_overlap=rule or none"
            )

    def _grow_hidden(
        self, state: DecodeState, source: TokenSource, requests: Sequence[RequestState]
    ) -> None:
        if not requests:
            return
        clock = state.clock
        assert isinstance(clock, SimulatedClock), "draft_overlap=full is checked at composition"
        draft_state = copy(state)
        draft_state.clock = SimulatedClock(clock.profile, scale=clock.scale)
        self._grow(draft_state, source, requests)
        now, seconds = clock.now(), draft_state.clock.now()
        began = max(self._submitted_s.get(r.id, now) for r in requests)
        clock.drafted.add(began_s=began, seconds=seconds, target_done_s=now)
        clock.wait_until(began + seconds)
        self._submitted_s.update((request.id, clock.now()) for request in requests)


def _next_level(tree: TokenTree, level: IntArray, children: int) -> IntArray:
    """Makes nodes of each node's first ``children`` candidates; returns the next level's slots."""
    existing = NO_SLOTS
    if len(level) and int(level[-1]) + 1 < len(tree):  # part of a tree survived a commit
        existing = np.flatnonzero(np.isin(tree.parents, level))
    rows, columns = np.nonzero(tree.candidate_logprobs[level, :children] > -np.inf)
    new = tree.take(level.take(rows), columns)
    return np.concatenate([existing, new]) if len(existing) else new
