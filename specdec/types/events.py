"""Draft passes in flight, and what can happen while a policy waits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specdec.types.nodes import Nodes


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A draft pass in flight.

    Attributes:
        nodes: the nodes that it expands.
        due_s: time of the run's clock at which it ends; None where only polling tells.
    """

    nodes: Nodes
    due_s: float | None = None


class EventKind(StrEnum):
    """What can happen while a policy waits.

    ``TARGET``: ``Executor.collect`` would not wait. ``DRAFT``: a draft pass has ended, and its
    candidates are in the trees. ``EARLY``: exits or early hidden states have arrived.
    """

    TARGET = "target"
    DRAFT = "draft"
    EARLY = "early"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened; ``ticket``: the ended draft pass of a ``DRAFT`` event."""

    kind: EventKind
    ticket: Ticket | None = None
