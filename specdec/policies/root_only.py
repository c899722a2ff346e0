from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.interfaces import TokenSource, TreePolicy
from specdec.policies.tree_growth import ready_requests, unsubmitted
from specdec.types import Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState


class RootOnly(TreePolicy):
    """Submits each root once and never calls the source (autoregressive decoding, ``ar``)."""

    value_dependent = False

    def held_nodes(self, in_flight: int) -> int:
        return 1

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        return unsubmitted(ready_requests(state, serial=True))
