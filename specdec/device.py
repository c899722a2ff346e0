"""Moves data between host and device, and stores rows of probabilities [A, V] in compact forms.

With a vocabulary of 128k, a row of float64 takes a megabyte. Verifiers that support
``SupportProbs`` work on the tokens of positive probability; rows of ``RemoteProbs`` stay in another
process until they are read. Both convert to a dense array wherever numpy expects one.

Shape letters: A rows, V vocabulary, W selected rows, S stored entries, N entries of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

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
    """Normalised probabilities on the host; only those that are positive are stored."""

    # int64[A, S], or [S] for a single row: token ids, increasing up to the padding
    ids: npt.NDArray[np.int64]
    values: _Array  # float64[A, S] or [S]; 0 in the padding
    vocab_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.ids.shape[:-1], self.vocab_size)

    @property
    def support(self) -> tuple[npt.NDArray[np.int64], _Array]:
        """Returns token ids int64[N] and probabilities float64[N] without padding, row by row."""
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


class RowKeeper(Protocol):
    def rows(self, node_ids: npt.NDArray[np.int64]) -> _Array: ...

    def values(self, node_id: int, tokens: npt.NDArray[np.int64]) -> _Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class RemoteProbs:
    """Normalised probabilities that stay in the process that computed them until they are read."""

    keeper: RowKeeper  # fetches rows; a row exists while its node is in the tree
    node_ids: npt.NDArray[np.int64]  # int64[A], or [] for a single row: the node of each row
    vocab_size: int
    # node id -> token -> probability, for values that have been sent already
    known: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.node_ids.shape, self.vocab_size)

    def __len__(self) -> int:
        return len(self.node_ids)

    def __getitem__(self, index: int | slice | npt.NDArray[np.int64]) -> RemoteProbs:
        ids = np.asarray(self.node_ids[index])
        return RemoteProbs(self.keeper, ids, self.vocab_size, self.known)

    def __iter__(self) -> Iterator[RemoteProbs]:
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> _Array:
        rows = self.keeper.rows(np.atleast_1d(self.node_ids))
        return np.asarray(rows if self.node_ids.ndim else rows[0], dtype)

    def of(self, token: int) -> float:
        node_id = int(self.node_ids)
        known = self.known.get(node_id, {}).get(token)
        if known is None:
            return float(self.keeper.values(node_id, np.array([token]))[0])
        return known


Probs: TypeAlias = _Array | SupportProbs | RemoteProbs
"""Rows of probabilities; all three types convert to an array."""


def on_host(probs: Probs) -> _Array:
    return np.asarray(probs)


def rows_on_host(rows: Sequence[Probs]) -> _Array:
    """Stacks single rows of one request to float64[A, V]; one message fetches remote ones."""
    kept = [row for row in rows if isinstance(row, RemoteProbs)]
    if kept and len(kept) == len(rows):
        return kept[0].keeper.rows(np.array([int(row.node_ids) for row in kept]))
    return np.stack([on_host(row) for row in rows])


def concatenate(parts: Sequence[Probs]) -> _Array | SupportProbs:
    """Concatenates rows; the result is dense unless all parts are ``SupportProbs``."""
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
