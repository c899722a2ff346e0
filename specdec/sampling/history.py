"""Logits processors that look at a node's history, applied to all answered nodes of a request.

A node of a tree has a history of its own: the committed tokens and its path.

Shape letters: A nodes, V vocabulary, T history length, n n-gram size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from specdec.types import NO_NODE, Commit, CommitKind, IntArray, TreeRows

_PAD = -1  # stands before histories that are shorter than the longest; no token has this id


class LogitsProcessor(Protocol):
    """A Hugging Face logits processor: a function of history and scores, without memory."""

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor: ...


def repeated_ngrams(histories: Sequence[IntArray], size: int) -> tuple[IntArray, IntArray]:
    """The tokens that would complete an n-gram which the history already holds.

    Equal to transformers' ``NoRepeatNGramLogitsProcessor``, for all histories at once.

    Args:
        histories: A arrays int64[T_i].
        size: n >= 1.

    Returns:
        (rows, tokens), int64[B] each: ``tokens[b]`` is banned for ``histories[rows[b]]``; a pair
        may occur more than once.
    """
    lengths = [len(history) for history in histories]
    longest = max(lengths, default=0)
    if longest < size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    stacked = np.full((len(histories), longest), _PAD, np.int64)  # [A, T], aligned at the end
    for row, history in zip(stacked, histories, strict=True):
        row[longest - len(history) :] = history
    starts = longest - size + 1
    # A history shorter than n - 1 matches nothing: padding with all of it is followed by no token.
    match = stacked[:, size - 1 :] != _PAD
    for offset in range(size - 1):
        last = stacked[:, longest - size + 1 + offset, None]  # the history's own n - 1 last tokens
        match &= stacked[:, offset : offset + starts] == last
    rows, at = np.nonzero(match)
    return rows, stacked[rows, at + size - 1]


def apply_processors(
    processors: Sequence[LogitsProcessor], logits: torch.Tensor, histories: Sequence[IntArray]
) -> torch.Tensor:
    """Runs processors on each node with its own history, as token-by-token decoding would.

    One call per node: a processor sees exactly the ``input_ids`` of shape [1, T] that it would see
    in plain decoding, so the results are equal whatever the tree.

    Args:
        processors: applied in order.
        logits: [A, V].
        histories: A arrays int64[T_i], whole sequences up to and including the node.

    Returns:
        [A, V], a new tensor.
    """
    rows = []
    for row, history in zip(logits, histories, strict=True):
        input_ids = torch.from_numpy(history).to(logits.device)[None]
        scores = row[None].clone()  # a processor may write into its scores
        for processor in processors:
            scores = processor(input_ids, scores)  # type: ignore[arg-type]
        rows.append(scores)
    return torch.cat(rows) if rows else logits


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
