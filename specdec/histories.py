"""Histories of tree nodes on the rank that answers, rebuilt from rows and commits alone.

Logits processors look at the tokens before the one that is chosen; in a tree every node has its
own. The answering rank has no tree, so it follows what it is sent. Only needed where
``SamplingParams.needs_history``.

Shape letters: A nodes, T history length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec.types import NO_NODE, Commit, CommitKind, IntArray, TreeRows


@dataclass(slots=True)
class _Book:
    """One request: ``tokens[:length]`` are committed, the root last; id -> (token, parent id)."""

    tokens: IntArray
    length: int
    root_id: int | None = None
    last_step: int = -1
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def extend(self, tokens: IntArray) -> None:
        end = self.length + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(end, np.int64)])
        self.tokens[self.length : end] = tokens
        self.length = end

    def path(self, node_id: int) -> list[int]:
        """Tokens from below the root down to the node."""
        path = []
        while node_id != self.root_id:
            token, parent = self.nodes[node_id]
            if parent == NO_NODE:
                break
            path.append(token)
            node_id = parent
        return path[::-1]


class PathBook:
    """Knows the whole sequence up to each node that is on its way through the target."""

    def __init__(self) -> None:
        self._books: dict[int, _Book] = {}

    def open(self, request_id: int, prompt: IntArray) -> None:
        """Starts a request with its prompt, int64[T >= 1], whose last token is the first root."""
        self._books[request_id] = _Book(np.array(prompt, np.int64), len(prompt))

    def observe(self, rows: TreeRows) -> None:
        """Notes nodes that reached this rank; parents before or with their children."""
        book = self._books[rows.request]
        links = zip(rows.tokens.tolist(), rows.parent_ids.tolist(), strict=True)
        book.nodes.update(zip(rows.node_ids.tolist(), links, strict=True))

    def commit(self, commit: Commit) -> None:
        """Follows a decision; a repeated one (by step) and one without an answer change nothing."""
        book = self._books[commit.request]
        if commit.kind is CommitKind.NONE or commit.step <= book.last_step:
            return
        book.last_step = commit.step
        book.extend(np.append(commit.retired_tokens[1:], commit.next_token))
        book.root_id = commit.root_id
        nodes = book.nodes
        book.nodes = {i: nodes[i] for i in commit.kept_ids.tolist() if i in nodes}

    def close(self, request_id: int) -> None:
        """Forgets a request."""
        self._books.pop(request_id, None)

    def histories(self, request_id: int, node_ids: IntArray) -> list[IntArray]:
        """The sequence up to and including each node.

        Args:
            request_id: an open request.
            node_ids: int64[A], nodes observed and not pruned by a commit.

        Returns:
            A arrays int64[T_i]: committed tokens, then the path; views of one array.

        Raises:
            KeyError: for a node that is not known (a fault of the caller).
        """
        book = self._books[request_id]
        paths = [book.path(node_id) for node_id in node_ids.tolist()]
        deepest = max(map(len, paths), default=0)
        whole = np.empty((len(paths), book.length + deepest), np.int64)
        whole[:, : book.length] = book.tokens[: book.length]
        for row, path in zip(whole, paths, strict=True):
            row[book.length : book.length + len(path)] = path
        return [row[: book.length + len(path)] for row, path in zip(whole, paths, strict=True)]
