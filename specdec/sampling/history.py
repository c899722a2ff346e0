"""The token sequence up to each node of a request's tree, for logits processors.

Every node of a tree has its own history: the committed tokens, then the path from the root to it.

Shape letters: A nodes, T history length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec.sampling.transform import SamplingParams
from specdec.types import NO_NODE, Commit, IntArray, TreeRows


@dataclass(slots=True)
class _RequestHistory:
    """State of one request.

    Attributes:
        tokens: int64[T], the committed tokens, the root last.
        root_id: node id of the root; None before the first commit.
        last_step: step of the last commit.
        nodes: node id -> (token, parent id).
    """

    tokens: IntArray
    root_id: int | None = None
    last_step: int = -1
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def path(self, node_id: int) -> list[int]:
        """Tokens of the path from the root (excluded) to the node."""
        path: list[int] = []
        while node_id != self.root_id:
            token, parent = self.nodes[node_id]
            if parent == NO_NODE:
                break
            path.insert(0, token)
            node_id = parent
        return path


class HistoryTracker:
    """Tracks the token sequence up to each node in flight through the target.

    Histories are rebuilt from the rows that pass through an executor and from commits, so that
    logits processors see the same tokens on any rank. Requests without processors are ignored.
    """

    def __init__(self) -> None:
        self._requests: dict[int, _RequestHistory] = {}

    def open(self, request_id: int, prompt: IntArray, params: SamplingParams) -> None:
        """Adds a request with its prompt, int64[T >= 1], whose last token is the first root."""
        if params.needs_history:
            self._requests[request_id] = _RequestHistory(np.array(prompt, np.int64))

    def observe(self, rows: TreeRows) -> list[IntArray] | None:
        """Records nodes that reached this rank; parents before or together with their children.

        Returns:
            The nodes' histories; None for a request without processors.
        """
        request = self._requests.get(rows.request)
        if request is None:
            return None
        links = zip(rows.tokens.tolist(), rows.parent_ids.tolist(), strict=True)
        request.nodes.update(zip(rows.node_ids.tolist(), links, strict=True))
        return self.histories(rows.request, rows.node_ids)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Moves retired nodes into the histories; a second commit of a step changes nothing."""
        for commit in commits:
            request = self._requests.get(commit.request)
            if request is None or commit.step <= request.last_step:
                continue
            request.last_step = commit.step
            request.tokens = np.append(request.tokens, commit.new_tokens)
            request.root_id = commit.root_id
            nodes = request.nodes
            request.nodes = {i: nodes[i] for i in commit.kept_ids.tolist() if i in nodes}

    def close(self, request_id: int) -> None:
        """Removes a request."""
        self._requests.pop(request_id, None)

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
        request = self._requests[request_id]
        paths = [np.array(request.path(node_id), np.int64) for node_id in node_ids.tolist()]
        return [np.concatenate([request.tokens, path]) for path in paths]
