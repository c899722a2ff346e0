from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.interfaces import TokenSource
from specdec.types import Candidates, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState


class NullSource(TokenSource):
    """Proposes no candidates, for plain autoregressive decoding."""

    gives_probs = True  # vacuously: all of its candidates are sampled

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        return Candidates.empty(len(nodes))
