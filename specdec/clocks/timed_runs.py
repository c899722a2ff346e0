"""Runs whose time is measured, and what has to be prepared before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet


class RunObserver(Protocol):
    """Prepares for timed runs; captures CUDA graphs, for example."""

    def begin_timed(self) -> None:
        """A timed run is about to begin: captures what the run is likely to need."""
        ...

    def end_timed(self) -> None:
        """The run has ended."""
        ...


_observers: WeakSet[RunObserver] = WeakSet()
_is_timed = False


def observe(observer: RunObserver) -> None:
    """Calls ``observer`` before and after every timed run, as long as it exists."""
    _observers.add(observer)


def is_timed() -> bool:
    """Whether a timed run is in progress, in which nothing must be captured."""
    return _is_timed


def begin_timed_run() -> None:
    """Lets all observers capture; from now on nothing is captured."""
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
    """A run whose time is measured: no graph is captured within it.

    A capture takes as long as several passes. Shapes that have occurred before the run are captured
    before it; those that occur first within it run without a graph until it has ended.
    """
    begin_timed_run()
    try:
        yield
    finally:
        end_timed_run()
