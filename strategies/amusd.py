"""AMUSD (arXiv 2410.17375): draft and target run at the same time, without waiting for each other.

A rejection prunes the draft's chain; the draft pass that runs at that moment is not interrupted,
and its candidates are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.parts.fields import DraftCount, validated
from specdec.policies.free_draft import FreeDraft
from specdec.policies.tree_growth import ready_requests, unsubmitted
from specdec.types import Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState


class FreeRunning(FreeDraft):
    """Submits every drafted token as soon as the target is ready; the draft never stops.

    Args:
        ahead: maximum number of tokens below the root, submitted or not.
        wait: submit no root without a draft token below it, as in the paper. False: the target
            never waits.
    """

    @validated
    def __init__(self, *, ahead: DraftCount, wait: bool = True) -> None:
        super().__init__(ahead)
        self.wait = wait

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=False)
        return unsubmitted(r for r in requests if not (self.wait and self._comes_later(r)))

    def can_submit(self, state: DecodeState) -> bool:
        return True

    def _comes_later(self, request: RequestState) -> bool:
        return len(request.tree) == 1 and self.can_draft(request)
