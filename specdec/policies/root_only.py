"""No speculation: one token per request in flight (autoregressive decoding, plain pipelines)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.policies.tree_growth import Stateless, ready_requests, unsubmitted
from specdec.types import Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState


class RootOnly(Stateless):
    """Submits each root once and never asks the source: the baseline ``ar``."""

    value_dependent = False
    serial = True

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        return 1

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """The roots that the target has not been given."""
        return unsubmitted(ready_requests(state, serial=True))
