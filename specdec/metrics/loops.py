"""Share of looping text, which raises the acceptance of every speculative method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

NGRAM = 8


def repeated_ngrams(tokens: Sequence[int], n: int = NGRAM) -> npt.NDArray[np.bool_]:
    """Marks tokens that end an n-gram generated before (overlaps count).

    Args:
        tokens, n: int[T], generated tokens without the prompt, and length of the n-gram.

    Returns:
        bool[T]; the first n - 1 are False, and an n-gram's first occurrence is not a repetition.
    """
    row = np.asarray(tokens, np.int64)
    repeated = np.zeros(len(row), np.bool_)
    if len(row) >= n:
        grams = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(row, n))
        keys = grams.view(np.dtype((np.void, grams.dtype.itemsize * n))).ravel()
        _, first = np.unique(keys, return_index=True)
        repeated[n - 1 :] = True
        repeated[n - 1 + first] = False
    return repeated


def loop_share(outputs: Iterable[Sequence[int]], n: int = NGRAM) -> float | None:
    """Share of ``repeated_ngrams`` among the tokens of all outputs; None without tokens."""
    repeated = [repeated_ngrams(output, n) for output in outputs]
    total = sum(len(of) for of in repeated)
    return int(sum(of.sum() for of in repeated)) / total if total else None
