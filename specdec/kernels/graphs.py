"""CUDA graphs: the modes of ``model.graphs``, padded row counts, and graph capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, TypeVar

import torch

from specdec.errors import UserError

T = TypeVar("T")

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows that passes and draws are padded to; more rows run without static buffers."""


class Graphs(StrEnum):
    """How passes and draws of few rows run.

    ``OFF``: operation by operation. ``REPLAY``: over static buffers, operation by operation (any
    device). ``CUDA``: over static buffers, as CUDA graphs. ``AUTO``: ``CUDA`` on CUDA devices, else
    ``OFF``.
    """

    OFF = "off"
    REPLAY = "replay"
    CUDA = "cuda"
    AUTO = "auto"


def resolve_graphs(graphs: str, device: torch.device) -> Graphs:
    """Returns the mode that ``model.graphs`` selects on ``device``; never ``AUTO``.

    Raises:
        UserError: for an unknown mode, or ``CUDA`` on another device.
    """
    if graphs not in list(Graphs):
        raise UserError(f"model.graphs={graphs} is unknown; choose {', '.join(Graphs)}")
    if graphs == Graphs.AUTO:
        return Graphs.CUDA if device.type == "cuda" else Graphs.OFF
    if graphs == Graphs.CUDA and device.type != "cuda":
        raise UserError(
            f"model.graphs=cuda needs a CUDA device, but model.device is {device.type}; use"
            " model.graphs=off, or replay for the same buffers without graphs"
        )
    return Graphs(graphs)


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA ``device`` the current one, on which Triton and CUDA graphs launch."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def round_up(number: int, choices: Sequence[int]) -> int:
    """Returns the first of the ascending ``choices`` that is at least ``number``."""
    return next(choice for choice in choices if choice >= number)


def capture(launch: Callable[[], T], pool: Any) -> Callable[[], T]:
    """Captures ``launch`` as a CUDA graph and returns its replay.

    ``launch`` runs twice before the capture, on a side stream, because libraries and compilers
    initialise themselves in their first calls. It must write the same values every time.

    Every replay returns the same output tensors. Graphs that share a pool overwrite each other's
    intermediate results and outputs: copy the outputs of a replay before the next one.

    Args:
        launch: takes no arguments; reads and writes tensors at fixed addresses.
        pool: of ``torch.cuda.graph_pool_handle``.

    Raises:
        UserError: if ``launch`` cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # Thread-local, because other threads (such as NCCL's) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = launch()
    except RuntimeError as error:
        cause = error.__context__ or error  # ending an aborted capture raises a second error
        reason = str(cause).splitlines()[0]
        raise UserError(
            f"model.graphs=cuda cannot capture a pass or a draw of this model ({reason}):"
            " its forward may wait for the device, or memory is short; use model.graphs=off"
        ) from error

    def replay() -> T:
        graph.replay()
        return outputs

    return replay
