"""Policies whose draft models never wait: after every pass the next one starts.

If the source is not asynchronous, a pass runs when it is started, and the target waits for its end;
``sources.Background`` makes any source asynchronous.
"""

import numpy as np

from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.policies.tree_growth import append_best, live_requests, open_bottom
from specdec.state import DecodeState, RequestState
from specdec.types import NO_NODE, Event, EventKind, Nodes


class FreePasses(TreePolicy):
    """Base of policies that start draft passes until the target is ready, at most ``ahead`` tokens
    below the root.

    Rejection verifiers, whose output for a seed would depend on times, are not allowed.
    ``feeds_busy_target``: a step also ends when a busy target can be given more nodes.
    """

    value_dependent = False
    time_dependent = True
    serial = False
    feeds_busy_target = False
    ahead: int

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.ahead

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        idle = not any(request.awaiting for request in live_requests(state))
        while True:
            self.start_passes(state, events)
            waits = idle and not self.feeds_busy_target and bool(events.running)
            event = events.next_draft() if waits else events.next()
            if event.kind is EventKind.TARGET:
                return False
            if event.kind is EventKind.DRAFT:
                self.grow(state, event)
                if (idle or self.feeds_busy_target) and self.can_submit(state):
                    return True

    def start_passes(self, state: DecodeState, events: Events) -> None:
        raise NotImplementedError

    def grow(self, state: DecodeState, event: Event) -> None:
        raise NotImplementedError

    def can_submit(self, state: DecodeState) -> bool:
        raise NotImplementedError


class FreeDraft(FreePasses):
    """Base of policies that extend one chain of at most ``ahead`` tokens per request."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self._childless: dict[int, int] = {}  # request -> node without candidates

    def open(self, request: RequestState) -> None:
        self._childless[request.id] = NO_NODE

    def close(self, request_id: int) -> None:
        del self._childless[request_id]

    def can_draft(self, request: RequestState) -> bool:
        slots = open_bottom(request)
        return (
            len(slots) > 0
            and len(request.tree) <= self.ahead
            and int(request.tree.ids[slots[0]]) != self._childless.get(request.id, NO_NODE)
        )

    def start_passes(self, state: DecodeState, events: Events) -> None:
        busy = {i for ticket in events.running for i, _ in ticket.nodes.items}
        for request in live_requests(state):
            if request.id not in busy and self.can_draft(request):
                events.start(Nodes(((request.id, request.tree.ids[open_bottom(request)]),)), 1)

    def grow(self, state: DecodeState, event: Event) -> None:
        assert event.ticket is not None
        for request_id, ids in event.ticket.nodes.items:
            request = state.requests.get(request_id)
            if request is None or (slot := int(request.tree.slots(ids)[0])) == NO_NODE:
                continue
            if not len(append_best(request.tree, np.array([slot]), 1, 1)):
                self._childless[request_id] = int(ids[0])
