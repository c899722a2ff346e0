from dataclasses import dataclass

import numpy as np

from specdec.device import Probs, on_host
from specdec.types import Candidates, FloatArray, IntArray, NodeMap, Nodes


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: IntArray
    logprobs: FloatArray
    count: int
    probs: Probs | None


class CandidateCache(NodeMap[_Row]):
    """Stores candidates by node, for sources that may expand a node more than once."""

    def missing(self, nodes: Nodes) -> Nodes:
        return nodes.where(np.array([row is None for row in self.get(nodes)], np.bool_))

    def keep(self, nodes: Nodes, candidates: Candidates) -> None:
        """Stores candidates; ignores rows of count 0 and rows of closed requests."""
        counts = candidates.counts.tolist()
        for request_id, ids, rows in nodes.packed():
            for row, node_id in enumerate(ids.tolist(), rows.start):
                if counts[row] and request_id in self:
                    probs = None if candidates.probs is None else candidates.probs[row]
                    self[request_id][node_id] = _Row(
                        candidates.tokens[row], candidates.logprobs[row], counts[row], probs
                    )

    def recall(self, nodes: Nodes, k: int) -> Candidates:
        """Returns up to ``k`` stored candidates per node; count 0 for nodes without a row."""
        rows = self.get(nodes)
        stored = [row for row in rows if row is not None]
        if not stored:
            return Candidates.empty(len(nodes))
        width = min(k, max(len(row.tokens) for row in stored))
        known = np.array([row is not None for row in rows], np.bool_)
        found = Candidates.empty(len(stored), width)
        for at, row in enumerate(stored):
            num = min(width, row.count)
            found.tokens[at, :num] = row.tokens[:num]
            found.logprobs[at, :num] = row.logprobs[:num]
            found.counts[at] = num
        probs = [on_host(row.probs) for row in stored if row.probs is not None]
        return Candidates(
            tokens=found.tokens,
            logprobs=found.logprobs,
            counts=found.counts,
            probs=np.stack(probs) if probs else None,
        ).spread(known)
