"""Measures looping text, which raises the acceptance rate of every speculative method."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

NGRAM = 8


def repeated_ngrams(tokens: Sequence[int], n: int = NGRAM) -> npt.NDArray[np.bool_]:
    """Returns bool[T]: whether a token ends an n-gram that occurred before, perhaps overlapping."""
    row = np.asarray(tokens, np.int64)
    repeated = np.zeros(len(row), np.bool_)
    if len(row) >= n:
        grams = np.lib.stride_tricks.sliding_window_view(row, n)
        repeated[n - 1 :] = pd.DataFrame(grams).duplicated()
    return repeated


def loop_share(outputs: Iterable[Sequence[int]], n: int = NGRAM) -> float | None:
    repeated = np.concatenate([np.zeros(0, bool), *(repeated_ngrams(out, n) for out in outputs)])
    return int(repeated.sum()) / len(repeated) if len(repeated) else None
