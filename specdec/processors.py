"""Logits processors that look at a node's history, applied to all answered nodes of a request.

A node of a tree has a history of its own: the committed tokens and its path.

Shape letters: A nodes, V vocabulary, T history length, n n-gram size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from specdec.types import IntArray

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
