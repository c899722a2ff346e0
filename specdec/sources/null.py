"""The source without proposals, for plain autoregressive decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.metrics.counters import SourceCounters
from specdec.types import Candidates, Commit, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class NullSource:
    """Proposes no candidates."""

    needs = Needs()
    gives_probs = True  # vacuously: all of its candidates are sampled
    vocab_size: int | None = None

    def __init__(self) -> None:
        self.counters = SourceCounters()

    def open(self, request: RequestState) -> None:
        """No-op."""

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Count 0 for every node."""
        return Candidates.empty(len(nodes))

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """No-op."""

    def close(self, request_id: int) -> None:
        """No-op."""
