"""Moves data between host and device, and stores rows of probabilities [A, V] in a compact form.

With a vocabulary of 128k, a row of float64 takes a megabyte. Verifiers that support
``SupportProbs`` read only the tokens of positive probability; numpy functions convert a
``SupportProbs`` to a dense array.

Shape letters: A rows, V vocabulary, W selected rows, S entries stored per row, N positive ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_Array: TypeAlias = npt.NDArray[np.float64]


def to_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    # Pageable memory is staged before the call returns, so ``array`` may be reused at once.
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class SupportProbs:
    """Rows of normalised probabilities on the host, of which only the positive ones are stored."""

    # int64[A, S], or [S] for a single row: token ids, increasing up to the padding
    ids: npt.NDArray[np.int64]
    values: _Array  # float64[A, S] or [S]; 0 in the padding
    vocab_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.ids.shape[:-1], self.vocab_size)

    @property
    def support(self) -> tuple[npt.NDArray[np.int64], _Array]:
        """Returns the positive entries, row by row: ids int64[N], probabilities float64[N]."""
        positive = self.values > 0.0
        return self.ids[positive], self.values[positive]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | npt.NDArray[np.int64]) -> SupportProbs:
        return SupportProbs(self.ids[index], self.values[index], self.vocab_size)

    def __iter__(self) -> Iterator[SupportProbs]:
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> _Array:
        dense = np.zeros(self.shape)
        ids, values = self.support
        rows = np.nonzero(self.values)[:-1]
        dense[(*rows, ids)] = values
        return np.asarray(dense, dtype)


Probs: TypeAlias = _Array | SupportProbs
"""Rows of probabilities; both types convert to an array."""


def on_host(probs: Probs) -> _Array:
    return np.asarray(probs)


def concatenate(parts: Sequence[Probs]) -> _Array | SupportProbs:
    """Concatenates rows. The result is dense unless all are ``SupportProbs`` of one vocabulary."""
    supports = [part for part in parts if isinstance(part, SupportProbs)]
    if len(supports) < len(parts) or len({part.vocab_size for part in supports}) != 1:
        return np.concatenate([on_host(part) for part in parts])
    if len(parts) == 1:
        return supports[0]
    shape = sum(map(len, supports)), max(part.ids.shape[1] for part in supports)
    ids, values, start = np.zeros(shape, np.int64), np.zeros(shape), 0
    for part in supports:
        rows = slice(start, start + len(part))
        start = rows.stop
        width = part.ids.shape[1]
        ids[rows, :width], values[rows, :width] = part.ids, part.values
    return SupportProbs(ids, values, supports[0].vocab_size)
