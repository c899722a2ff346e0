"""Marks timed runs, so that CUDA graphs are captured before them and never within them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet


class RunObserver(Protocol):
    """Is notified before and after timed runs, for example to capture CUDA graphs."""

    def begin_timed(self) -> None: ...

    def end_timed(self) -> None: ...


_observers: WeakSet[RunObserver] = WeakSet()
_is_timed = False


def observe(observer: RunObserver) -> None:
    """Registers an observer of timed runs; only a weak reference to it is kept."""
    _observers.add(observer)


def is_timed() -> bool:
    """Returns whether a timed run is in progress, during which nothing may be captured."""
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
    """Marks the block as a timed run, within which no CUDA graph is captured.

    A capture takes as long as several passes. Shapes seen before the run are captured before it;
    shapes seen first within it run without a graph until it has ended.
    """
    begin_timed_run()
    try:
        yield
    finally:
        end_timed_run()
