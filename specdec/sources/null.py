"""The source that proposes nothing: plain autoregressive decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.metrics.counters import SourceCounters
from specdec.types import Candidates, Commit, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class NullSource:
    """Has no candidates for any node."""

    needs = Needs()
    gives_probs = True  # vacuously: every candidate it gives was sampled
    vocab_size: int | None = None

    def __init__(self) -> None:
        self.counters = SourceCounters()

    def open(self, request: RequestState) -> None:
        """Nothing to prepare."""

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Count 0 for every node."""
        return Candidates.empty(len(nodes))

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Nothing to follow."""

    def close(self, request_id: int) -> None:
        """Nothing to forget."""
