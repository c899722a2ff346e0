"""Logits processors, applied to each answered node with the token sequence that leads to it.

Shape letters: A nodes, V vocabulary, T sequence length, n n-gram size, B banned pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.types import IntArray

_PAD = -1  # precedes histories that are shorter than the longest; no token has this id


class LogitsProcessor(Protocol):
    """A Hugging Face logits processor: a stateless function of history and scores."""

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor: ...


def repeated_ngrams(histories: Sequence[IntArray], size: int) -> tuple[IntArray, IntArray]:
    """Returns the tokens that would complete an n-gram that the history already contains.

    Equals transformers' ``NoRepeatNGramLogitsProcessor``, for all histories at once.

    Args:
        histories: A arrays int64[T_i].
        size: n >= 1.

    Returns:
        (rows, tokens), int64[B] each: ``tokens[b]`` is banned for ``histories[rows[b]]``; pairs may
        repeat.
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
    """Applies processors to each node with its own history.

    One call per node, with the same ``input_ids`` [1, T] as in plain decoding, so that results do
    not depend on the tree.

    Args:
        processors: applied in order.
        logits: [A, V].
        histories: A arrays int64[T_i], the sequences up to and including each node.

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
