"""Captured draws: the sampling transform on the device as one graph instead of ninety launches.

As for passes (``specdec.models.captured``): fixed buffers, rows padded to one of a few
counts, one graph per shape and transform, or with ``replay`` the same buffers without graphs, on
any device. A row's result does not depend on the rows beside it, so padding may hold anything.

Shape letters: A rows, R padded rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec.device import ROW_COUNTS, Graphs, at_least, captured, current, resolve_graphs, to_host
from specdec.sampling import on_device
from specdec.sampling.on_device import NOT_FOUND, NUCLEUS, checked, weigh
from specdec.types import FloatArray, IntArray

_MAX_KINDS = 64  # of shapes and transforms; what comes later is drawn as ever


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What draws of one shape read.

    Attributes:
        logits: [R, V].
        uniforms: float64[R].
        sent: float64[R] on the host.
    """

    logits: torch.Tensor
    uniforms: torch.Tensor
    sent: FloatArray


class StaticDraws:
    """Draws of few rows over static buffers.

    Attributes:
        replays: draws that went through the buffers.
    """

    def __init__(self, *, graphs: str) -> None:
        """Captures nothing yet: each shape and transform is captured when it first occurs.

        Args:
            graphs: a value of ``Graphs``.
        """
        self.replays = 0
        self._graphs = graphs
        self._buffers: dict[tuple[Any, ...], _Buffers] = {}
        self._launches: dict[tuple[Any, ...], Callable[[], torch.Tensor]] = {}
        self._pool: Any = None

    def serves(self, logits: torch.Tensor) -> bool:
        """Whether draws from logits[A, V] go through static buffers."""
        device = logits.device
        if device.type == "mps" or not 0 < len(logits) <= ROW_COUNTS[-1]:  # no float64 there
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
        """As ``on_device.sample``, for logits that ``serves`` agreed to."""
        transform: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        num, (_, vocab_size) = len(logits), logits.shape
        shape = (at_least(num, ROW_COUNTS), vocab_size, logits.dtype, logits.device)
        key = (*shape, temperature, top_k, top_p)
        if key not in self._launches and len(self._launches) >= _MAX_KINDS:
            return on_device.sample(logits, uniforms, **transform)
        with current(logits.device):
            buffers = self._buffers_of(shape)
            buffers.logits[:num] = logits
            buffers.sent[:num] = uniforms
            # From pageable memory, which is staged before the call returns.
            buffers.uniforms.copy_(torch.from_numpy(buffers.sent), non_blocking=True)
            if key not in self._launches:
                self._launches[key] = self._made(buffers, transform)
            found = to_host(self._launches[key]()[:num])
        self.replays += 1
        if (found == NOT_FOUND).any():  # top-p's cut lies beyond the entries that were looked at
            return on_device.sample(logits, uniforms, **transform)
        return checked(found, logits)

    def _buffers_of(self, shape: tuple[Any, ...]) -> _Buffers:
        if shape not in self._buffers:
            num_rows, vocab_size, dtype, device = shape
            with torch.inference_mode(False):  # to be filled in both modes
                self._buffers[shape] = _Buffers(
                    torch.zeros(num_rows, vocab_size, dtype=dtype, device=device),
                    torch.zeros(num_rows, dtype=torch.float64, device=device),
                    np.zeros(num_rows),
                )
        return self._buffers[shape]

    def _made(self, buffers: _Buffers, transform: dict[str, Any]) -> Callable[[], torch.Tensor]:
        width = min(NUCLEUS, buffers.logits.shape[1])

        def launch() -> torch.Tensor:
            return weigh(buffers.logits, **transform, width=width).draw(buffers.uniforms)

        if resolve_graphs(self._graphs, buffers.logits.device) is not Graphs.CUDA:
            return launch
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return captured(launch, self._pool)
