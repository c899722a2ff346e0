"""Captured draws: the sampling transform on the device as one CUDA graph instead of 90 launches.

As in ``specdec.models.captured``: fixed buffers, rows padded to one of a few counts, and one graph
per shape and sampling parameters; with ``model.graphs=replay`` the same buffers without graphs, on
any device. A row's result does not depend on other rows, so padding rows may contain any values.

Shape letters: A rows, R padded rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.device import to_host
from specdec.kernels.graphs import (
    ROW_COUNTS,
    Graphs,
    capture,
    device_guard,
    resolve_graphs,
    round_up,
)
from specdec.sampling import on_device
from specdec.sampling.on_device import NOT_FOUND, NUCLEUS, checked, weigh
from specdec.types import FloatArray, IntArray

_MAX_KINDS = 64  # combinations of shape and parameters; later ones are drawn uncaptured


class StaticDraws:
    """Draws of few rows over static buffers.

    Attributes:
        replays: number of calls that drew through the buffers.
    """

    def __init__(self, *, graphs: str) -> None:
        """Captures nothing yet: each shape and set of parameters is captured when it first occurs.

        Args:
            graphs: a value of ``Graphs``.
        """
        self.replays = 0
        self._graphs = graphs
        self._buffers: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._launches: dict[tuple[Any, ...], Callable[[], Tensor]] = {}
        self._pool: Any = None

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
        key = (*shape, temperature, top_k, top_p)
        if key not in self._launches and len(self._launches) >= _MAX_KINDS:
            return on_device.sample(logits, uniforms, **transform)
        with device_guard(logits.device):
            if shape not in self._buffers:
                with torch.inference_mode(False):  # writable with inference mode on and off
                    empty = logits.new_zeros(shape[:2])
                    self._buffers[shape] = empty, empty.new_zeros(shape[0], dtype=torch.float64)
            rows, draws = self._buffers[shape]
            rows[:num] = logits
            # Pageable memory is staged before the call returns.
            draws[:num].copy_(torch.from_numpy(uniforms), non_blocking=True)
            if key not in self._launches:
                self._launches[key] = self._prepare(rows, draws, transform)
            tokens = to_host(self._launches[key]()[:num])
        self.replays += 1
        if (tokens == NOT_FOUND).any():  # top-p's cut lies beyond the examined entries
            return on_device.sample(logits, uniforms, **transform)
        return checked(tokens, logits)

    def _prepare(
        self, logits: Tensor, uniforms: Tensor, transform: dict[str, Any]
    ) -> Callable[[], Tensor]:
        width = min(NUCLEUS, logits.shape[1])

        def launch() -> Tensor:
            return weigh(logits, **transform, width=width).draw(uniforms)

        if resolve_graphs(self._graphs, logits.device) is not Graphs.CUDA:
            return launch
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(launch, self._pool)
