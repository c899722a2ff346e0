"""The token sequence up to each node of a request's tree, for logits processors.

Every node of a tree has its own history: the committed tokens, then the path from the root to it.

Shape letters: A nodes, T history length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.sampling.transform import SamplingParams
from specdec.types import Commit, IntArray, NodeMap, TreeRows


class HistoryTracker:
    """Tracks the token sequence up to each node in flight through the target.

    Histories are rebuilt from the rows that pass through an executor and from commits, so that
    logits processors see the same tokens on any rank. Requests without processors are ignored.
    """

    def __init__(self) -> None:
        self._committed: dict[int, IntArray] = {}  # request -> int64[T], the root last
        self._nodes: NodeMap[tuple[int, int]] = NodeMap()  # (token, parent id)

    def open(self, request_id: int, prompt: IntArray, params: SamplingParams) -> None:
        """Adds a request with its prompt, int64[T >= 1], whose last token is the first root."""
        if params.needs_history:
            self._committed[request_id] = np.array(prompt, np.int64)
            self._nodes.open(request_id)

    def observe(self, rows: TreeRows) -> list[IntArray] | None:
        """Records nodes that reached this rank; parents before or together with their children.

        Returns:
            The nodes' histories; None for a request without processors.
        """
        if rows.request not in self._nodes:
            return None
        links = zip(rows.tokens.tolist(), rows.parent_ids.tolist(), strict=True)
        self._nodes.update(rows.request, rows.node_ids, links)
        return self.histories(rows.request, rows.node_ids)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Moves retired nodes into the histories; a second commit of a step changes nothing."""
        self._nodes.commit(commits)
        for commit in commits:
            if (tokens := self._committed.get(commit.request)) is not None:
                up_to_old_root = tokens[: commit.prefix_len - len(commit.retired_ids) + 1]
                self._committed[commit.request] = np.append(up_to_old_root, commit.new_tokens)

    def close(self, request_id: int) -> None:
        """Removes a request."""
        self._committed.pop(request_id, None)
        self._nodes.close(request_id)

    def histories(self, request_id: int, node_ids: IntArray) -> list[IntArray]:
        """Returns the sequence up to and including each node.

        Args:
            request_id: an open request.
            node_ids: int64[A], nodes that were observed and not pruned by a commit.

        Returns:
            A arrays int64[T_i]: committed tokens, then the path.

        Raises:
            KeyError: for an unknown node.
        """
        return [self._history(request_id, node_id) for node_id in node_ids.tolist()]

    def _history(self, request_id: int, node_id: int) -> IntArray:
        nodes, path = self._nodes[request_id], list[int]()
        token, parent = nodes[node_id]
        while parent in nodes:  # the root's parent was retired
            path.append(token)
            token, parent = nodes[parent]
        return np.append(self._committed[request_id], np.array(path[::-1], np.int64))
