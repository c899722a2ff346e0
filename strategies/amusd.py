"""AMUSD (arXiv 2410.17375): draft and target run free, and neither waits for the other's end.

The draft drafts without stopping, one token per pass. The target verifies all tokens that it finds,
and waits only where there is none. A rejection prunes the draft's chain; a draft pass that runs at
that moment ends with candidates for a node that is gone, which are dropped.

    parts = amusd.build(bench, ahead=12)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.compose.presets import build_preset
from specdec.parts.fields import DraftCount, validated
from specdec.policies.free_draft import FreeDraft
from specdec.policies.tree_growth import live_requests, ready_requests, unsubmitted
from specdec.types import EventKind, Nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.compose.workbench import Parts, Workbench
    from specdec.interfaces import Events, TokenSource
    from specdec.state import DecodeState, RequestState
    from specdec.types import Commit, Output


def build(bench: Workbench, *, ahead: int | None = None, wait: bool | None = None) -> Parts:
    """AMUSD on a target device and a draft device.

    Args:
        bench: models, clock and seed.
        ahead, wait: see ``FreeRunning``.
    """
    return build_preset("amusd", bench, {"policy.ahead": ahead, "policy.wait": wait})


class FreeRunning:
    """Feeds the target every drafted token as soon as it can take it; the draft never stops.

    Each request has one draft pass at a time, on the end of its chain, which is followed by the
    next at once. A pass may outlive the step in which it began. With a source that is not
    asynchronous (``sources.Background`` makes one of any) a pass runs when it is started, and the
    target waits for its end.

    Rejection verifiers are refused: they would keep the target's distribution, but the output for
    a seed would depend on the times of passes.
    """

    value_dependent = False
    time_dependent = True
    serial = False

    @validated
    def __init__(self, *, ahead: DraftCount, wait: bool = True) -> None:
        """Sets the limits.

        Args:
            ahead: maximum number of tokens below the root, in the target or not.
            wait: submit no root without a draft token below it, as in the paper. False: the target
                never waits. Default: true.
        """
        self.ahead = ahead
        self.wait = wait
        self._draft = FreeDraft(self.ahead)

    def open(self, request: RequestState) -> None:
        """No node is known to have no candidates."""
        self._draft.open(request)

    def held_nodes(self, in_flight: int) -> int:
        """Maximum number of a request's nodes in the target; see ``TreePolicy``."""
        return 1 + self.ahead

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """What the target does not have of each chain."""
        requests = ready_requests(state, serial=False)
        return unsubmitted(r for r in requests if not (self.wait and self._comes_later(r)))

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        """Drafts until the target is ready; where it has nothing to do, until there is a token."""
        idle = not any(request.awaiting for request in live_requests(state))
        while True:
            self._draft.start_passes(state, events)
            waits = idle and bool(events.running)
            event = events.next_draft() if waits else events.next()
            if event.kind is EventKind.TARGET:
                return False
            if event.kind is EventKind.DRAFT:
                self._draft.grow(state, event)
                if idle:
                    return True

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """No-op: ``DecodeState.commit`` has rerooted the trees."""

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._draft.close(request_id)

    def _comes_later(self, request: RequestState) -> bool:
        """Whether the tree has the root alone, and a token below it will be drafted."""
        return len(request.tree) == 1 and self._draft.can_draft(request)
