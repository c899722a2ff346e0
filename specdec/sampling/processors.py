"""Logits processors, which run once per answered node on the token sequence that leads to it.

Every node of a tree has its own history: the committed tokens, then the path from the root to it.

Shape letters: A nodes, V vocabulary, T sequence length, B banned pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.types import Commit, IntArray, NodeMap, TreeRows

_PAD = -1  # precedes histories that are shorter than the longest; no token has this id


class LogitsProcessor(Protocol):
    """A Hugging Face logits processor: a stateless function of history and scores."""

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor: ...


def repeated_ngrams(histories: Sequence[IntArray], size: int) -> tuple[IntArray, IntArray]:
    """Finds the tokens that would complete an n-gram that the history already contains.

    The result equals that of transformers' ``NoRepeatNGramLogitsProcessor``. It is (rows, tokens),
    int64[B] each: ``tokens[b]`` is banned for ``histories[rows[b]]``, int64[T_i]; pairs may repeat.
    """
    lengths = [len(history) for history in histories]
    longest = max(lengths, default=0)
    if longest < size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    stacked = np.full((len(histories), longest), _PAD, np.int64)  # [A, T], aligned at the end
    for row, history in zip(stacked, histories, strict=True):
        row[longest - len(history) :] = history
    starts = longest - size + 1
    # A history shorter than n - 1 matches nothing: its last n - 1 entries include padding, and no
    # token follows an occurrence of them.
    match = stacked[:, size - 1 :] != _PAD
    for offset in range(size - 1):
        last = stacked[:, longest - size + 1 + offset, None]  # of the history's last n - 1 tokens
        match &= stacked[:, offset : offset + starts] == last
    rows, columns = np.nonzero(match)
    return rows, stacked[rows, columns + size - 1]


def apply_processors(
    processors: Sequence[LogitsProcessor], logits: Tensor, histories: Sequence[IntArray]
) -> Tensor:
    """Applies processors to logits [A, V] of nodes, each with its own history, int64[T_i].

    Each node has a call of its own with the same ``input_ids`` [1, T] as in plain decoding, so that
    results do not depend on the tree.
    """
    rows = []
    for row, history in zip(logits, histories, strict=True):
        input_ids = torch.from_numpy(history).to(logits.device)[None]
        scores = row[None].clone()  # a processor may write into its scores
        for processor in processors:
            scores = processor(input_ids, scores)  # type: ignore[arg-type]
        rows.append(scores)
    return torch.cat(rows) if rows else logits


class HistoryTracker:
    """Tracks the token sequence up to each node in flight through the target.

    Histories are rebuilt from the rows that pass through an executor and from commits, so that
    logits processors see the same tokens on any rank. Requests that were not opened are ignored.
    """

    def __init__(self) -> None:
        self._committed: dict[int, IntArray] = {}  # request -> int64[T], the root last
        self._nodes: NodeMap[tuple[int, int]] = NodeMap()  # (token, parent id)

    def open(self, request_id: int, prompt: IntArray) -> None:
        """Adds a request with its prompt, int64[T >= 1], whose last token is the first root."""
        self._committed[request_id] = np.array(prompt, np.int64)
        self._nodes.open(request_id)

    def observe(self, rows: TreeRows) -> list[IntArray] | None:
        """Records nodes that reached this rank, and returns their histories.

        Parents must be observed before or together with their children. Returns None for a request
        that was not opened.
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
        self._committed.pop(request_id, None)
        self._nodes.close(request_id)

    def histories(self, request_id: int, node_ids: IntArray) -> list[IntArray]:
        """Returns the committed tokens and the path to each node, as A arrays int64[T_i]."""
        return [self._history(request_id, node_id) for node_id in node_ids.tolist()]

    def _history(self, request_id: int, node_id: int) -> IntArray:
        nodes, path = self._nodes[request_id], list[int]()
        token, parent = nodes[node_id]
        while parent in nodes:  # the root's parent was retired
            path.append(token)
            token, parent = nodes[parent]
        return np.append(self._committed[request_id], np.array(path[::-1], np.int64))
