"""Distributions that stay on the device they were computed on until somebody needs them elsewhere.

With a vocabulary of 128k a row of float64 takes a megabyte. Parts that know ``DeviceProbs`` work on
it where it lies; for all others it turns into an array, by one copy, when it is used as one.

Shape letters: A rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specdec.errors import UserError

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


T = TypeVar("T")

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows that graphs are captured for; work on more rows is not captured."""


class Graphs(StrEnum):
    """How passes of few rows run.

    ``OFF``: launched one by one. ``REPLAY``: over static buffers, launched one by one (any device).
    ``CUDA``: over static buffers, as CUDA graphs. ``AUTO``: ``CUDA`` on such devices, else off.
    """

    OFF = "off"
    REPLAY = "replay"
    CUDA = "cuda"
    AUTO = "auto"


def resolve_graphs(graphs: str, device: torch.device) -> Graphs:
    """What ``model.graphs`` means on ``device``: never ``AUTO``.

    Raises:
        UserError: for an unknown word, or CUDA graphs without a CUDA device.
    """
    if graphs not in list(Graphs):
        raise UserError(f"model.graphs={graphs} is unknown; choose {', '.join(Graphs)}")
    if graphs == Graphs.AUTO:
        return Graphs.CUDA if device.type == "cuda" else Graphs.OFF
    if graphs == Graphs.CUDA and device.type != "cuda":
        raise UserError(
            f"model.graphs=cuda needs a CUDA device, and model.device is {device.type}; use"
            " model.graphs=off, or replay for the same buffers without graphs"
        )
    return Graphs(graphs)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current one: Triton and graphs go there, whatever their operands."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captured(launch: Callable[[], T], pool: Any) -> Callable[[], T]:
    """Captures ``launch`` as a CUDA graph whose outputs stay where they are.

    It runs twice before, on a side stream, as capturing needs: libraries and compilers set
    themselves up in their first calls. What it writes is the same each time.

    Graphs of one pool overwrite each other's intermediate results, and through them each other's
    outputs: what a replay gave must be copied before the next one.

    Raises:
        UserError: for a forward that cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may use the device meanwhile: NCCL's look after its operations.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = launch()
    except RuntimeError as error:
        cause = error.__context__ or error  # ending a capture that broke off fails again
        reason = str(cause).splitlines()[0]
        raise UserError(
            f"model.graphs=cuda cannot capture a pass or a draw of this model ({reason}):"
            " its forward may wait for the device, or memory is short; use model.graphs=off"
        ) from error

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


def at_least(number: int, choices: Sequence[int]) -> int:
    """The smallest choice that is no less than ``number``."""
    return next(choice for choice in choices if choice >= number)
