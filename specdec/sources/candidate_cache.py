"""A cache of proposed candidates, for sources that may expand a node more than once.

Shape letters: W nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.device import Probs, on_host
from specdec.types import Candidates, Commit, FloatArray, IntArray, Nodes


@dataclass(frozen=True, slots=True)
class _Row:
    """The row of ``Candidates`` of one node."""

    tokens: IntArray
    logprobs: FloatArray
    count: int
    probs: Probs | None


class CandidateCache:
    """Rows of ``Candidates`` by live node."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, _Row]] = {}  # request -> node id -> row

    def open(self, request_id: int) -> None:
        """Starts a request."""
        self._rows[request_id] = {}

    def missing(self, nodes: Nodes) -> Nodes:
        """The nodes that have no row."""
        missing = []
        for request_id, ids in nodes.items:
            rows = self._rows[request_id]
            new = [i for i in ids.tolist() if i not in rows]
            if new:
                missing.append((request_id, np.array(new, np.int64)))
        return Nodes(tuple(missing))

    def keep(self, nodes: Nodes, candidates: Candidates) -> None:
        """Stores candidates; rows of count 0 and rows of closed requests are ignored."""
        counts = candidates.counts.tolist()
        row = 0
        for request_id, ids in nodes.items:
            rows = self._rows.get(request_id)
            for node_id in ids.tolist():
                if counts[row] and rows is not None:
                    probs = None if candidates.probs is None else candidates.probs[row]
                    rows[node_id] = _Row(
                        candidates.tokens[row], candidates.logprobs[row], counts[row], probs
                    )
                row += 1

    def recall(self, nodes: Nodes, k: int) -> Candidates:
        """Up to ``k`` stored candidates per node; count 0 for nodes without a row."""
        rows = [self._rows[r].get(i) for r, ids in nodes.items for i in ids.tolist()]
        stored = [row for row in rows if row is not None]
        if not stored:
            return Candidates.empty(len(nodes))
        width = min(k, max(len(row.tokens) for row in stored))
        empty = Candidates.empty(len(nodes), width)
        probs = None
        if stored[0].probs is not None:
            probs = np.full((len(nodes), len(stored[0].probs)), 1.0 / len(stored[0].probs))
        for at, row in enumerate(rows):
            if row is not None:
                num = min(width, row.count)
                empty.tokens[at, :num] = row.tokens[:num]
                empty.logprobs[at, :num] = row.logprobs[:num]
                empty.counts[at] = num
                if probs is not None:
                    assert row.probs is not None
                    probs[at] = on_host(row.probs)
        return Candidates(
            tokens=empty.tokens, logprobs=empty.logprobs, counts=empty.counts, probs=probs
        )

    def commit(self, commits: Sequence[Commit]) -> None:
        """Drops the rows of retired and pruned nodes."""
        for commit in commits:
            rows = self._rows.get(commit.request)
            if rows:
                kept = set(commit.kept_ids.tolist())
                self._rows[commit.request] = {i: row for i, row in rows.items() if i in kept}

    def clear(self) -> None:
        """Drops all rows; the requests stay open."""
        for rows in self._rows.values():
            rows.clear()

    def close(self, request_id: int) -> None:
        """Drops the request."""
        self._rows.pop(request_id, None)
