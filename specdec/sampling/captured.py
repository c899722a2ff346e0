"""Captured draws: the sampling transform on the device as one CUDA graph instead of 90 launches.

As in ``specdec.models.captured``: fixed buffers, rows padded to one of a few counts, and one graph
per shape and sampling parameters; with ``model.graphs=replay`` the same buffers without graphs, on
any device. A row's result does not depend on other rows, so padding rows may contain any values.

Shape letters: A rows, R padded rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from specdec.device import to_host
from specdec.kernels.graphs import (
    ROW_COUNTS,
    Graphs,
    Launches,
    device_guard,
    observe_timed_runs,
    resolve_graphs,
    round_up,
    smaller,
)
from specdec.sampling import on_device
from specdec.sampling.on_device import NOT_FOUND, NUCLEUS, checked, weigh
from specdec.types import FloatArray, IntArray

_MAX_KINDS = 64  # combinations of shape and parameters; later ones are drawn uncaptured

_Shape: TypeAlias = tuple[int, int, torch.dtype, torch.device]  # R, V, type and place of logits
_Filters: TypeAlias = tuple[float, int, float]  # temperature, top-k, top-p


class StaticDraws:
    """Draws of few rows over static buffers.

    Attributes:
        replays: number of calls that drew through the buffers.
    """

    def __init__(self, *, graphs: str) -> None:
        """Captures nothing yet.

        Args:
            graphs: a value of ``Graphs``.
        """
        self.replays = 0
        self._graphs = graphs
        self._buffers: dict[_Shape, tuple[Tensor, Tensor]] = {}
        # ``serves`` leaves ``AUTO`` to CUDA devices.
        self._launches = Launches[Tensor](captures=graphs != Graphs.REPLAY)
        observe_timed_runs(self)

    def serves(self, logits: Tensor) -> bool:
        """Whether draws from logits[A, V] use static buffers."""
        few = 0 < len(logits) <= ROW_COUNTS[-1]
        return few and resolve_graphs(self._graphs, logits.device) is not Graphs.OFF

    def sample(
        self, logits: Tensor, uniforms: FloatArray, *, temperature: float, top_k: int, top_p: float
    ) -> IntArray:
        """Computes ``on_device.sample`` for logits for which ``serves`` is true."""
        transform: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        num, (_, vocab_size) = len(logits), logits.shape
        shape = (round_up(num, ROW_COUNTS), vocab_size, logits.dtype, logits.device)
        kind = (shape, (temperature, top_k, top_p))
        if kind not in self._launches and len(self._launches) >= _MAX_KINDS:
            return on_device.sample(logits, uniforms, **transform)
        with device_guard(logits.device):
            rows, draws = self._buffers_of(shape)
            rows[:num] = logits
            # Pageable memory is staged before the call returns.
            draws[:num].copy_(torch.from_numpy(uniforms), non_blocking=True)
            tokens = to_host(self._launches.run(kind, partial(self._make_launch, kind))[:num])
        self.replays += 1
        if (tokens == NOT_FOUND).any():  # top-p's cut lies beyond the examined entries
            return on_device.sample(logits, uniforms, **transform)
        return checked(tokens, logits)

    def begin_timed(self) -> None:
        """Captures draws of as many rows as have occurred, and of fewer."""
        for (num, vocab_size, dtype, device), transform in self._launches.take_occurred():
            with torch.inference_mode(), device_guard(device):
                for fewer in smaller(num, ROW_COUNTS):
                    kind = ((fewer, vocab_size, dtype, device), transform)
                    if len(self._launches) < _MAX_KINDS:
                        self._launches.prepare(kind, partial(self._make_launch, kind))

    def end_timed(self) -> None:
        """Nothing to do."""

    def _buffers_of(self, shape: _Shape) -> tuple[Tensor, Tensor]:
        """Logits [R, V] and uniforms float64[R]."""
        if shape not in self._buffers:
            num, vocab_size, dtype, device = shape
            with torch.inference_mode(False):  # writable with inference mode on and off
                logits = torch.zeros(num, vocab_size, dtype=dtype, device=device)
                self._buffers[shape] = logits, logits.new_zeros(num, dtype=torch.float64)
        return self._buffers[shape]

    def _make_launch(self, kind: tuple[_Shape, _Filters]) -> Callable[[], Tensor]:
        shape, (temperature, top_k, top_p) = kind
        logits, uniforms = self._buffers_of(shape)
        width = min(NUCLEUS, logits.shape[1])

        def launch() -> Tensor:
            weights = weigh(logits, temperature=temperature, top_k=top_k, top_p=top_p, width=width)
            return weights.draw(uniforms)

        return launch
