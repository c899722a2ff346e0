"""Events of a target that is ready when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from specdec.interfaces import Events


class Until(Events):
    """Events of a target that is ready when ``ready`` says so; no pass runs free."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.running = []
        self.ready = ready  # type: ignore[method-assign]


READY = Until(lambda: True)
BUSY = Until(lambda: False)
