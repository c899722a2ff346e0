"""What every clock is asked.

Ranks are numbered from 0, the controller (which also runs the draft); pipeline stages are 1 .. N. A
local target shares rank 0 with its draft. Times are seconds; profiles state milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from specdec.clocks.timeline import Timeline

CONTROLLER = 0
"""Rank of the controller."""


class Work(StrEnum):
    """Kinds of work that a latency profile prices; ``EXIT``: an exit head and its output layer."""

    STAGE = "stage"
    DRAFT = "draft"
    HEAD = "head"
    PRUNE = "prune"
    TRANSFER = "transfer"
    EXIT = "exit"


class ClockKind(StrEnum):
    """What a clock's times are.

    ``MEASURED``: what the wall clock says on this hardware. ``PACED``: the wall clock, with each
    piece of work stretched to what a latency profile says. ``SIMULATED``: virtual.
    """

    MEASURED = "measured"
    PACED = "paced"
    SIMULATED = "simulated"


class Clock(Protocol):
    """All time goes through one clock; executors and sources charge it for their work.

    Where ranks are processes, each has a clock of its own and charges only itself, in three steps:
    ``start``, the work, ``charge``. A simulated clock is one object that knows all ranks, and may
    be charged before the work.
    """

    kind: ClockKind
    timeline: Timeline | None
    """Where pieces of work are written down; None unless a trace was asked for."""
    drafting: bool
    """Whether a source is being asked: what the controller is charged now is draft work."""

    def start(self, rank: int) -> None:
        """The rank begins a piece of work (nothing on a virtual clock).

        Without it, work is taken to begin with its first metered model call.
        """
        ...

    def charge(self, rank: int, kind: Work, num_tokens: int) -> None:
        """Accounts the work that the rank has just done on ``num_tokens`` rows.

        A charge without a new ``start`` goes on where the last one ended (the head after the
        layers).
        """
        ...

    def align(self, rank: int, to: int) -> None:
        """The rank's next work begins no earlier than ``to`` ends what it has been charged."""
        ...

    def follow(self, rank: int, to: int) -> None:
        """As ``align``, for work that is part of one schedule with what was charged before.

        A paced rank that was woken late does not begin late by it: it has so much less to wait.
        """
        ...

    def barrier(self, ranks: Sequence[int]) -> None:
        """Makes the controller wait for the ranks, and them for each other."""
        ...

    def busy(self, rank: int) -> bool:
        """Whether ``rank`` is still at work from the controller's point of view."""
        ...

    def now(self) -> float:
        """Seconds since the run began, on the controller."""
        ...

    def wait_until(self, seconds: float) -> None:
        """Lets time pass on the controller until ``seconds`` (the next arrival)."""
        ...
