"""Plants a bug: replaces one function or method by one that sometimes behaves differently.

``Planted`` counts those calls: a bug whose code never ran proves nothing.
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
    """A planted bug.

    Attributes:
        fired: number of calls in which the planted code differed from the shipped code.
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
        """Restores the shipped code."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Bug:
    """One mutation.

    Attributes:
        name: name on the command line.
        story: the fault in one sentence.
        plant: plants the bug.
        overrides: overrides of a configuration in which it has an effect.
        listed: whether it is one of the twelve that every release must detect.
    """

    name: str
    story: str
    plant: Callable[[Planted], None]
    overrides: tuple[str, ...]
    listed: bool


BUGS: dict[str, Bug] = {}


def bug(
    story: str, *overrides: str, listed: bool = True
) -> Callable[[Callable[[Planted], None]], Callable[[Planted], None]]:
    """Registers a mutation under its function's name."""

    def register(plant: Callable[[Planted], None]) -> Callable[[Planted], None]:
        name = plant.__name__
        BUGS[name] = Bug(name, story, plant, (*overrides, *SMALL), listed)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[Planted]:
    """Plants the bug inside the block."""
    work = Planted()
    try:
        BUGS[name].plant(work)
        yield work
    finally:
        work.restore()
