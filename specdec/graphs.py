"""CUDA graphs: how they are asked for, and how a piece of work becomes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, TypeVar

import torch

from specdec.errors import UserError

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
