"""The controller's wall time, divided into model calls, declared waits and overhead (the rest)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter


class Meter:
    """Sums the wall time of model calls (embedding to logits) and of declared waits.

    Attributes:
        model_s: seconds by model name ("target", "draft", ...).
        calls: calls by model name.
        draft_s: seconds of model calls made while a token source runs (``DecodeState.drafting``).
        wait_s: seconds of declared waits (paced clocks, transport).
        drafting: whether a token source is running.
    """

    def __init__(self) -> None:
        self.model_s: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.draft_s = 0.0
        self.wait_s = 0.0
        self.drafting = False
        self._began: float | None = None

    def reset(self) -> None:
        """Sets all sums to zero, in place."""
        self.model_s.clear()
        self.calls.clear()
        self.draft_s = 0.0
        self.wait_s = 0.0

    @contextmanager
    def model(self, name: str) -> Iterator[None]:
        """Counts the block as one call of model ``name``."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - start)

    def add(self, name: str, seconds: float, calls: int = 1) -> None:
        """Counts calls of model ``name`` that took ``seconds`` in all and have just ended."""
        if self._began is None:
            self._began = perf_counter() - seconds
        self.model_s[name] += seconds
        self.calls[name] += calls
        if self.drafting:
            self.draft_s += seconds

    def take_began(self) -> float | None:
        """Start of the first model call since the last ``take_began``; None without a call."""
        began, self._began = self._began, None
        return began

    def waiting(self) -> AbstractContextManager[None]:
        """Counts the block as a declared wait."""
        return _Waiting(self)

    @property
    def total_model_s(self) -> float:
        """Seconds in model calls, over all models."""
        return sum(self.model_s.values())


class _Waiting:
    """The context manager of ``Meter.waiting``."""

    __slots__ = ("_meter", "_start")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._meter.wait_s += perf_counter() - self._start
