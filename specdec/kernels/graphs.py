"""CUDA graphs: the modes of ``model.graphs``, padded row counts, and what is captured when."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

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


class RunObserver(Protocol):
    """Prepares for runs whose time is measured; see ``timed_run``."""

    def begin_timed(self) -> None:
        """A timed run is about to begin: captures what the run is likely to need."""
        ...

    def end_timed(self) -> None:
        """The run has ended."""
        ...


_observers: WeakSet[RunObserver] = WeakSet()
_is_timed = False


def observe_timed_runs(observer: RunObserver) -> None:
    """Tells ``observer`` of every timed run of this process, as long as it exists."""
    _observers.add(observer)


def begin_timed_run() -> None:
    """Lets all observers capture; from now on nothing is captured."""
    global _is_timed
    for observer in tuple(_observers):
        observer.begin_timed()
    _is_timed = True


def end_timed_run() -> None:
    """Shapes that occur from now on are captured at once."""
    global _is_timed
    _is_timed = False
    for observer in tuple(_observers):
        observer.end_timed()


@contextmanager
def timed_run() -> Iterator[None]:
    """A run whose time is measured: no graph is captured within it.

    A capture takes as long as several passes. Shapes that have occurred before the run are captured
    before it; those that occur first within it run without a graph until it has ended.
    """
    begin_timed_run()
    try:
        yield
    finally:
        end_timed_run()


class Launches(Generic[T]):
    """Launches over static buffers by shape, each captured once."""

    def __init__(self, *, captures: bool) -> None:
        """Starts empty.

        Args:
            captures: whether launches become CUDA graphs; otherwise they run as they are.
        """
        self._captures = captures
        self._ready: dict[Hashable, Callable[[], T]] = {}
        self._occurred: dict[Hashable, None] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        """Number of launches that were captured; without graphs, of those that have occurred."""
        return len(self._ready)

    def __contains__(self, shape: Hashable) -> bool:
        return shape in self._ready

    def run(self, shape: Hashable, make: Callable[[], Callable[[], T]]) -> T:
        """Replays the shape's graph, which is captured first, except within ``timed_run``.

        Args:
            shape: identifies the launch.
            make: makes a launch that reads and writes tensors at fixed addresses.
        """
        ready = self._ready.get(shape)
        if ready is None:
            self._occurred[shape] = None
            if self._captures and _is_timed:
                return make()()
            self.prepare(shape, make)
            ready = self._ready[shape]
        return ready()

    def prepare(self, shape: Hashable, make: Callable[[], Callable[[], T]]) -> None:
        """Captures a shape unless it is captured; its buffers hold valid inputs of any pass."""
        if shape in self._ready:
            return
        launch = make()
        if self._captures:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            launch = capture(launch, self._pool)
        self._ready[shape] = launch

    def take_occurred(self) -> list[Any]:
        """The shapes that have occurred for the first time since the last call."""
        occurred, self._occurred = list(self._occurred), {}
        return occurred


def smaller(number: int, choices: Sequence[int]) -> list[int]:
    """Those of the ascending ``choices`` that are at most ``number``."""
    return [choice for choice in choices if choice <= number]


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
        # On a stream of this device: torch's own is that of the first capture's.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            outputs = launch()
    except RuntimeError as error:
        cause = error.__context__ or error  # ending an aborted capture raises a second error
        reason = str(cause).splitlines()[0]
        raise UserError(
            f"model.graphs=cuda cannot capture a pass of this model ({reason}):"
            " its forward may wait for the device, or memory is short; use model.graphs=off"
        ) from error

    def replay() -> T:
        graph.replay()
        return outputs

    return replay
