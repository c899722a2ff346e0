"""Draft passes in flight, and what can happen while a policy waits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specdec.types.nodes import Candidates, Nodes


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A draft pass in flight.

    Attributes:
        nodes: the nodes that it expands.
        due_s: time of the run's clock at which it ends; None where only polling tells.
        level: the model that runs it, 0 for the draft; see ``Events.start``.
        candidates: the result of a pass that has run at its start.
    """

    nodes: Nodes
    due_s: float | None = None
    level: int = 0
    candidates: Candidates | None = None


class EventKind(StrEnum):
    """What can happen while a policy waits.

    ``TARGET``: ``Executor.collect`` would not wait. ``DRAFT``: a draft pass has ended, and its
    candidates are in the trees, or in the event if a further model ran it. ``EARLY``: exits or
    early hidden states have arrived.
    """

    TARGET = "target"
    DRAFT = "draft"
    EARLY = "early"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened.

    Attributes:
        kind: what.
        ticket: the ended draft pass of a ``DRAFT`` event.
        candidates: its candidates, if a further model ran it (``Ticket.level`` above 0).
    """

    kind: EventKind
    ticket: Ticket | None = None
    candidates: Candidates | None = None
