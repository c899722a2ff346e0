from dataclasses import replace

import numpy as np

from specdec.device import concatenate
from specdec.types import Candidates, NodeMap, Nodes


class CandidateCache(NodeMap[Candidates]):
    """Stores candidates, one row per node, for sources that may expand a node more than once."""

    def missing(self, nodes: Nodes) -> Nodes:
        return nodes.where(np.array([row is None for row in self.get(nodes)], np.bool_))

    def keep(self, nodes: Nodes, candidates: Candidates) -> None:
        """Stores each node's candidates; ignores nodes without any and closed requests."""
        counts = candidates.counts.tolist()
        for request_id, ids, rows in nodes.packed():
            for row, node_id in enumerate(ids.tolist(), rows.start):
                if counts[row] and request_id in self:
                    self[request_id][node_id] = candidates.take(np.array([row]))

    def recall(self, nodes: Nodes, k: int) -> Candidates:
        """Returns up to ``k`` stored candidates per node; none for a node without stored ones."""
        rows = self.get(nodes)
        stored = [row for row in rows if row is not None]
        if not stored:
            return Candidates.empty(len(nodes))
        width = min(k, max(row.tokens.shape[1] for row in stored))
        probs = [row.probs for row in stored if row.probs is not None]
        found = Candidates.empty(len(stored), width)
        for at, row in enumerate(stored):
            num = found.counts[at] = min(width, int(row.counts[0]))
            found.tokens[at, :num] = row.tokens[0, :num]
            found.logprobs[at, :num] = row.logprobs[0, :num]
        found = replace(found, probs=concatenate(probs) if probs else None)
        return found.spread(np.array([row is not None for row in rows], np.bool_))
