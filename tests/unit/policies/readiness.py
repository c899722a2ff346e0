"""Events of a target that is ready when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.interfaces import Events


class Until(Events):
    """Events of a target that is ready when ``ready`` says so; no pass runs free."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.running = []
        self._ready = ready

    def ready(self) -> bool:
        return self._ready()

    def start(self, *given: Any, **keys: Any) -> Any:
        raise AssertionError("no pass runs free")

    next = next_draft = start


READY = Until(lambda: True)
BUSY = Until(lambda: False)
