"""Divides this process's wall time into model calls, declared waits and overhead (the rest)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

_HOST = torch.device("cpu")


class Meter:
    """Sums the time of model calls (embedding to logits) and of waits declared by ``waiting``.

    On the CPU, a call's time is wall time. On a CUDA device it is that between two CUDA events,
    which are read when a sum is read, so that no call waits for the device.

    Attributes:
        wait_s: seconds spent in ``waiting`` (paced clocks, transport).
        drafting: whether a token source is running; set by ``DecodeState.drafting``.
    """

    def __init__(self) -> None:
        self._model_s: defaultdict[str, float] = defaultdict(float)
        self._draft_s = 0.0
        self._events: list[tuple[str, bool, Any, Any]] = []  # of calls that are not summed yet
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.wait_s = 0.0
        self.drafting = False
        self._began: float | None = None

    @property
    def model_s(self) -> Mapping[str, float]:
        """Seconds by model name ("target", "draft", ...); reading it waits for running calls."""
        self._sum_events()
        return self._model_s

    @property
    def draft_s(self) -> float:
        self._sum_events()
        return self._draft_s

    def reset(self) -> None:
        self._model_s.clear()
        self._events.clear()
        self.calls.clear()
        self._draft_s = 0.0
        self.wait_s = 0.0

    @contextmanager
    def model(self, name: str, device: torch.device = _HOST) -> Iterator[None]:
        """Times the block as one call of model ``name``; makes ``device`` current if it is CUDA."""
        if device.type != "cuda":
            start = perf_counter()
            yield
            self.add(name, perf_counter() - start)
            return
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
        if self._began is None:
            self._began = perf_counter()
        self.calls[name] += 1
        self._events.append((name, self.drafting, begin, end))

    def add(self, name: str, seconds: float, calls: int = 1) -> None:
        if self._began is None:
            self._began = perf_counter() - seconds
        self._model_s[name] += seconds
        self.calls[name] += calls
        if self.drafting:
            self._draft_s += seconds

    def _sum_events(self) -> None:
        for name, drafting, start, end in self._events:
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
            self._model_s[name] += seconds
            if drafting:
                self._draft_s += seconds
        self._events.clear()

    def take_began(self) -> float | None:
        began, self._began = self._began, None
        return began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.wait_s += perf_counter() - start

    @property
    def total_model_s(self) -> float:
        return sum(self.model_s.values())
