"""How a bug is planted: one function or method is replaced by one that sometimes does otherwise.

``Planted`` counts those calls: a bug whose code never ran has proved nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

SMALL = (
    "model=random",
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.draft_layers=3",
    "model.vocab_size=32",
    "model.max_positions=256",
)
"""Overrides that make a run short: tiny float64 models."""


@dataclass(slots=True)
class Planted:
    """A bug at work.

    Attributes:
        fired: calls in which the planted code did something else than the shipped code.
    """

    fired: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    def swap(self, place: str, make: Callable[[Any], Any]) -> None:
        """Replaces ``module:Class.name`` or ``module:name`` by ``make(original)``."""
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        original = vars(owner)[name]
        setattr(owner, name, make(original))
        self._stack.callback(setattr, owner, name, original)

    def restore(self) -> None:
        """Puts the shipped code back."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Bug:
    """One mutation.

    Attributes:
        name: short, for the command line.
        story: what goes wrong, in a sentence.
        plant: puts it in place.
        words: overrides of a configuration in which it matters.
        listed: whether it is one of the twelve that every release must find.
    """

    name: str
    story: str
    plant: Callable[[Planted], None]
    words: tuple[str, ...]
    listed: bool


BUGS: dict[str, Bug] = {}


def bug(
    story: str, *words: str, listed: bool = True
) -> Callable[[Callable[[Planted], None]], Callable[[Planted], None]]:
    """Registers a mutation under its function's name."""

    def register(plant: Callable[[Planted], None]) -> Callable[[Planted], None]:
        name = plant.__name__
        BUGS[name] = Bug(name, story, plant, (*words, *SMALL), listed)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[Planted]:
    """The bug is in the code inside the block."""
    work = Planted()
    try:
        BUGS[name].plant(work)
        yield work
    finally:
        work.restore()
