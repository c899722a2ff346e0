"""Distributions that stay on the device they were computed on until somebody needs them elsewhere.

With a vocabulary of 128k a row of float64 takes a megabyte. Parts that know ``DeviceProbs`` work on
it where it lies; for all others it turns into an array, by one copy, when it is used as one.

Shape letters: A rows, V vocabulary.
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
    """The tensor as an array; from a device by a copy, which waits for the device."""
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor; the host does not wait for what the device still has to do."""
    # From pageable memory, which is staged before the call returns: nothing has to be kept.
    return torch.from_numpy(array).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceProbs:
    """Normalised probabilities on a device.

    Attributes:
        rows: float64[A, V], or [V] of a single row.
        best: [A], or [], the largest logit of each row: not finite where the row cannot be sampled,
            which whoever copies a result of it to the host checks then.
    """

    rows: torch.Tensor
    best: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As an array's."""
        return tuple(self.rows.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice) -> DeviceProbs:
        """A row, or a range of rows; nothing is copied."""
        return DeviceProbs(self.rows[index], self.best[index])

    def __iter__(self) -> Iterator[DeviceProbs]:
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> _Array:
        """float64[A, V] on the host."""
        return np.asarray(to_host(self.rows), dtype)


Probs: TypeAlias = _Array | DeviceProbs
"""Rows of probabilities, on the host or on a device."""


def on_host(probs: Probs) -> _Array:
    """As an array; see ``DeviceProbs``."""
    return np.asarray(probs)


def taken(probs: Probs, rows: npt.NDArray[np.int64]) -> Probs:
    """The rows that ``rows``, int64[W], names, each as often as it is named."""
    if not isinstance(probs, DeviceProbs):
        return probs[rows]
    at = to_device(rows, probs.rows.device)
    return DeviceProbs(probs.rows[at], probs.best[at])


def joined(parts: Sequence[Probs]) -> Probs:
    """The rows of all parts, in order; on the device if all are."""
    there = [part for part in parts if isinstance(part, DeviceProbs)]
    if len(there) < len(parts) or len({part.rows.device for part in there}) != 1:
        return np.concatenate([on_host(part) for part in parts])
    return DeviceProbs(
        torch.cat([part.rows for part in there]), torch.cat([part.best for part in there])
    )
