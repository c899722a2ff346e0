"""Marks timed runs, so that CUDA graphs are captured before them and never within them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet


class RunObserver(Protocol):
    def begin_timed(self) -> None: ...

    def end_timed(self) -> None: ...


_observers: WeakSet[RunObserver] = WeakSet()
_is_timed = False


def observe(observer: RunObserver) -> None:
    _observers.add(observer)


def is_timed() -> bool:
    return _is_timed


def begin_timed_run() -> None:
    global _is_timed
    for observer in tuple(_observers):
        observer.begin_timed()
    _is_timed = True


def end_timed_run() -> None:
    global _is_timed
    _is_timed = False
    for observer in tuple(_observers):
        observer.end_timed()


@contextmanager
def timed_run() -> Iterator[None]:
    """Marks the block as a timed run, in which no CUDA graph is captured: passes of a shape that
    occurs there for the first time run without a graph until the block has ended.
    """
    begin_timed_run()
    try:
        yield
    finally:
        end_timed_run()
