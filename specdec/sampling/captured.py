"""Captured draws: the sampling transform on the device as one CUDA graph instead of 90 launches.

As in ``specdec.models.captured``: fixed buffers, rows padded to one of a few counts, and one graph
per shape and sampling parameters; with ``model.graphs=replay`` the same buffers without graphs, on
any device. A row's result does not depend on other rows, so padding rows may contain any values.

Shape letters: A rows, R padded rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Input buffers for one batch shape.

    Attributes:
        logits: [R, V].
        uniforms: float64[R].
        host_uniforms: float64[R] on the host, the source of ``uniforms``.
    """

    logits: torch.Tensor
    uniforms: torch.Tensor
    host_uniforms: FloatArray


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
        self._buffers: dict[tuple[Any, ...], _Buffers] = {}
        self._launches: dict[tuple[Any, ...], Callable[[], torch.Tensor]] = {}
        self._pool: Any = None

    def serves(self, logits: torch.Tensor) -> bool:
        """Whether draws from logits[A, V] use static buffers."""
        device = logits.device
        if device.type == "mps" or not 0 < len(logits) <= ROW_COUNTS[-1]:  # mps has no float64
            return False
        return resolve_graphs(self._graphs, device) is not Graphs.OFF

    def sample(
        self,
        logits: torch.Tensor,
        uniforms: FloatArray,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> IntArray:
        """Computes ``on_device.sample`` for logits for which ``serves`` is true."""
        transform: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        num, (_, vocab_size) = len(logits), logits.shape
        shape = (round_up(num, ROW_COUNTS), vocab_size, logits.dtype, logits.device)
        key = (*shape, temperature, top_k, top_p)
        if key not in self._launches and len(self._launches) >= _MAX_KINDS:
            return on_device.sample(logits, uniforms, **transform)
        with device_guard(logits.device):
            buffers = self._buffers_of(shape)
            buffers.logits[:num] = logits
            buffers.host_uniforms[:num] = uniforms
            # Pageable memory is staged before the call returns.
            buffers.uniforms.copy_(torch.from_numpy(buffers.host_uniforms), non_blocking=True)
            if key not in self._launches:
                self._launches[key] = self._prepare(buffers, transform)
            tokens = to_host(self._launches[key]()[:num])
        self.replays += 1
        if (tokens == NOT_FOUND).any():  # top-p's cut lies beyond the examined entries
            return on_device.sample(logits, uniforms, **transform)
        return checked(tokens, logits)

    def _buffers_of(self, shape: tuple[Any, ...]) -> _Buffers:
        if shape not in self._buffers:
            num_rows, vocab_size, dtype, device = shape
            with torch.inference_mode(False):  # writable with inference mode on and off
                self._buffers[shape] = _Buffers(
                    torch.zeros(num_rows, vocab_size, dtype=dtype, device=device),
                    torch.zeros(num_rows, dtype=torch.float64, device=device),
                    np.zeros(num_rows),
                )
        return self._buffers[shape]

    def _prepare(self, buffers: _Buffers, transform: dict[str, Any]) -> Callable[[], torch.Tensor]:
        width = min(NUCLEUS, buffers.logits.shape[1])

        def launch() -> torch.Tensor:
            return weigh(buffers.logits, **transform, width=width).draw(buffers.uniforms)

        if resolve_graphs(self._graphs, buffers.logits.device) is not Graphs.CUDA:
            return launch
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(launch, self._pool)
