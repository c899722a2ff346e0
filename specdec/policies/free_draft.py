"""A draft that never waits: one pass per request, on the end of its chain, and then the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.policies.tree_growth import append_best, live_requests, open_bottom
from specdec.types import NO_NODE, Event, Nodes

if TYPE_CHECKING:
    from specdec.interfaces import Events
    from specdec.state import DecodeState, RequestState


class FreeDraft:
    """The draft's part of a policy whose trees are chains.

    A pass may outlive the step in which it began. With a source that is not asynchronous
    (``sources.Background`` makes one of any) a pass runs when it is started.
    """

    def __init__(self, ahead: int) -> None:
        """Sets the limit.

        Args:
            ahead: maximum number of tokens below the root.
        """
        self.ahead = ahead
        self._silent: dict[int, int] = {}  # request -> node without candidates

    def open(self, request: RequestState) -> None:
        """No node is known to have no candidates."""
        self._silent[request.id] = NO_NODE

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        del self._silent[request_id]

    def can_draft(self, request: RequestState) -> bool:
        """Whether a pass on the end of the chain can add a token."""
        slots = open_bottom(request)
        return (
            len(slots) > 0
            and len(request.tree) <= self.ahead
            and int(request.tree.ids[slots[0]]) != self._silent.get(request.id, NO_NODE)
        )

    def start_passes(self, state: DecodeState, events: Events) -> None:
        """Starts a pass for every request that has none and can have one."""
        busy = {i for ticket in events.running for i, _ in ticket.nodes.items}
        for request in live_requests(state):
            if request.id not in busy and self.can_draft(request):
                events.start(Nodes(((request.id, request.tree.ids[open_bottom(request)]),)), 1)

    def grow(self, state: DecodeState, event: Event) -> None:
        """Makes the candidate of an ended pass a node; that of a pruned node is dropped."""
        assert event.ticket is not None
        for request_id, ids in event.ticket.nodes.items:
            request = state.requests.get(request_id)
            if request is None or (slot := int(request.tree.slots(ids)[0])) == NO_NODE:
                continue
            if not len(append_best(request.tree, np.array([slot]), 1, 1)):
                self._silent[request_id] = int(ids[0])
