"""Base of policies whose draft models never wait: after every pass the next one starts.

If the source is not asynchronous, a pass runs when it is started, and the target waits for its end;
``sources.Background`` makes any source asynchronous.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.policies.tree_growth import (
    append_best,
    as_nodes,
    last_position,
    live_requests,
    ready_requests,
)
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import NO_NODE, Candidates, Commit, Event, EventKind, IntArray, Nodes, Output

_NO_TOKEN = -1  # prediction after a node beyond a model's positions, which any token equals


class FreeDraft(TreePolicy):
    """Base of policies that start one draft pass after another until the target is ready.

    A request has one chain of tokens below its root, to which all models of the source contribute
    (``Chain``): a draft model, and middle models if ``num_levels``, the number of models, is above
    1. Rejection verifiers, whose output for a seed would depend on times, are not allowed.

    Args:
        ahead: maximum number of tokens below the root, of all models.
        least: number of new tokens that the target or a middle model waits for before it verifies
            them; 0: the target never waits, middle models wait for one.

    Attributes:
        feeds_busy_target: whether new nodes end a step even while the target verifies others.
    """

    value_dependent = False
    time_dependent = True
    serial = False
    feeds_busy_target = False
    num_levels = 1  # set by ``check_source``, before requests are opened

    def __init__(self, ahead: int, least: int = 1) -> None:
        self.ahead, self.least = ahead, least
        self.chains: dict[int, Chain] = {}

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.ahead

    def open(self, request: RequestState) -> None:
        self.chains[request.id] = Chain(request, self.num_levels, self.ahead, self.least)

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=False)
        return as_nodes((r, self.for_target(self.chains[r.id])) for r in requests)

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        idle = not any(request.awaiting for request in live_requests(state))
        while True:
            self._start_passes(state, events)
            waits = idle and not self.feeds_busy_target and bool(events.running)
            event = events.next_draft() if waits else events.next()
            if event.kind is EventKind.TARGET:
                return False
            if event.kind is EventKind.DRAFT:
                self._grow(event)
                if (idle or self.feeds_busy_target) and self.can_submit(state):
                    return True

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            if commit.request in self.chains:
                self.chains[commit.request].reroot()

    def close(self, request_id: int) -> None:
        del self.chains[request_id]

    def for_target(self, chain: "Chain") -> IntArray:
        """Returns int64[W]: slots of the unsubmitted nodes that the last model has reached; none if
        the target waits for more of them.
        """
        return chain.for_target()

    def can_submit(self, state: DecodeState) -> bool:
        return any(len(self.for_target(self.chains[r.id])) for r in live_requests(state))

    def _start_passes(self, state: DecodeState, events: Events) -> None:
        busy = {(ticket.level, i) for ticket in events.running for i, _ in ticket.nodes.items}
        for request in live_requests(state):
            chain = self.chains[request.id]
            for level in range(self.num_levels):
                if (level, request.id) not in busy and len(ids := chain.work(level)):
                    events.start(Nodes(((request.id, ids),)), 1, level)

    def _grow(self, event: Event) -> None:
        assert event.ticket is not None
        for request_id, ids, rows in event.ticket.nodes.packed():
            chain = self.chains.get(request_id)
            if chain is None:
                continue
            if event.candidates is None:
                chain.drafted(int(ids[0]))
            else:
                chain.judged(event.ticket.level, ids, event.candidates, rows)


@dataclass(slots=True)
class Chain:
    """The chain of one request, and the node that each model has reached.

    Attributes:
        request: its tree contains the chain and, until the next commit, replaced nodes.
        num_levels: number of draft and middle models, whose index is their level.
        reached: id of the last node that each model has written or confirmed; for the draft, the
            end of the chain.
        predicted: per model: node id -> the model's own next token after the node.
        childless: id of a node below which the draft has no candidates.
    """

    request: RequestState
    num_levels: int
    ahead: int
    least: int
    reached: list[int] = field(init=False)
    predicted: list[dict[int, int]] = field(init=False)
    childless: int = NO_NODE

    def __post_init__(self) -> None:
        self.reached = [self._tree.root_id] * self.num_levels
        self.predicted = [{} for _ in range(self.num_levels)]

    @property
    def _tree(self) -> TokenTree:
        return self.request.tree

    def for_target(self) -> IntArray:
        """Returns int64[W]: slots of the nodes to submit; none if the target waits for more."""
        path = self._to(self.num_levels - 1)
        new = path[self._tree.submitted_at[path] < 0]
        num = np.count_nonzero(new)  # without the root, which is slot 0
        return new[:0] if num < self.least and self._grows(len(path)) else new

    def work(self, level: int) -> IntArray:
        """Returns int64[W]: node ids for the next pass of model ``level``; none while it waits."""
        tree = self._tree
        path = self._to(0 if level == 0 else level - 1)
        inside = path[tree.positions[path] < last_position(self.request)]
        if level == 0:
            end = inside[len(path) - 1 :][: len(path) <= self.ahead]
            ids = tree.ids[end]
            return ids[(ids != self.childless) & ~tree.expanded[end]]
        start = int(np.searchsorted(tree.ids[path], self.reached[level]))
        num = len(path) - 1 - start
        if num == 0 or (num < self.least and self._grows(len(path))):
            return path[:0]
        ids = tree.ids[inside[start:]]
        return ids[[node_id not in self.predicted[level] for node_id in ids.tolist()]]

    def _grows(self, length: int) -> bool:
        """Whether the chain can become longer than its first ``length`` nodes before a commit."""
        return length <= self.ahead and (len(self._to(0)) > length or len(self.work(0)) > 0)

    def drafted(self, node_id: int) -> None:
        """Appends the draft's candidate below a node, if the chain still ends there."""
        if node_id != self.reached[0]:
            return
        slots = append_best(self._tree, self._tree.slots(np.array([node_id])), 1, 1)
        if not len(slots):
            self.childless = node_id
            return
        self.reached[0] = int(self._tree.ids[slots[0]])
        self._advance()

    def judged(self, level: int, ids: IntArray, candidates: Candidates, rows: slice) -> None:
        """Stores model ``level``'s next token after each node, from ``rows`` of ``candidates``."""
        tokens = np.where(candidates.counts[rows] > 0, candidates.tokens[rows, 0], _NO_TOKEN)
        live = self._tree.slots(ids) != NO_NODE
        self.predicted[level].update(zip(ids[live].tolist(), tokens[live].tolist(), strict=True))
        self._advance()

    def reroot(self) -> None:
        """Moves the chain to the tree's new root after a commit, and forgets pruned nodes."""
        live = set(self._tree.ids.tolist())
        self.predicted = [
            {i: t for i, t in tokens.items() if i in live} for tokens in self.predicted
        ]
        root = self._tree.root_id
        if self.reached[0] in live:
            self.reached = [node_id if node_id in live else root for node_id in self.reached]
        else:  # a model had replaced the node that is the root now
            end = int(self._tree.ids[self._end(0)])
            self.reached = [end, *[root] * (self.num_levels - 1)]
        self._advance()

    def _advance(self) -> None:
        """Lets each model extend or replace the chain that the smaller models before it drafted."""
        for level in range(1, self.num_levels):
            while self._step(level):
                pass

    def _step(self, level: int) -> bool:
        """Lets a model confirm, replace or append its next node; returns whether it could."""
        tree = self._tree
        token = self.predicted[level].get(self.reached[level])
        if token is None:
            return False
        path = self._to(0)
        at = int(np.searchsorted(tree.ids[path], self.reached[level]))
        ends = at == len(path) - 1
        confirmed = not ends and token in (_NO_TOKEN, int(tree.tokens[path[at + 1]]))
        if confirmed:
            slot = int(path[at + 1])
        elif token == _NO_TOKEN or at >= self.ahead:
            return False
        else:
            slot = self._written(int(path[at]), token)
            self.reached[0] = int(tree.ids[self._end(slot)])
        for below in range(1, level):  # the models before it are at least there, or start there
            behind = tree.slots(np.array([self.reached[below]]))[0]
            if not confirmed or tree.positions[behind] < tree.positions[slot]:
                self.reached[below] = int(tree.ids[slot])
        self.reached[level] = int(tree.ids[slot])
        return True

    def _written(self, parent: int, token: int) -> int:
        """Returns the slot of the child of ``parent`` with this token, created if missing."""
        tree = self._tree
        child = tree.child(parent, token)
        if child != NO_NODE:
            return child
        return int(tree.append(np.array([parent]), np.array([token]), np.zeros(1))[0])

    def _end(self, slot: int) -> int:
        """Returns the slot where the newest chain below a node ends (follows the last children)."""
        tree = self._tree
        while len(children := tree.children(slot)):
            slot = int(children[-1])
        return slot

    def _to(self, level: int) -> IntArray:
        """Returns int64[D + 1]: slots from the root to the node that a model has reached."""
        return self._tree.path(int(self._tree.slots(np.array([self.reached[level]]))[0]))
