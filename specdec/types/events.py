from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specdec.types.nodes import Candidates, Nodes


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A draft pass in flight.

    Attributes:
        nodes: the nodes that the pass expands.
        due_s: the time on the run's clock at which the pass ends; None if this is only known by
            polling.
        level: the index of the model that runs the pass (0 is the draft model); see
            ``Events.start``.
        candidates: the result, if the pass was computed when it started.
    """

    nodes: Nodes
    due_s: float | None = None
    level: int = 0
    candidates: Candidates | None = None


class EventKind(StrEnum):
    """What can happen while a policy waits.

    ``TARGET``: ``Executor.collect`` would return without waiting. ``DRAFT``: a draft pass has
    ended. ``EARLY``: exits or early hidden states have arrived.
    """

    TARGET = "target"
    DRAFT = "draft"
    EARLY = "early"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened while a policy waited.

    Attributes:
        ticket: the draft pass that ended (``DRAFT`` only).
        candidates: its candidates, if ``Ticket.level`` is above 0; those of level 0 are in the
            trees.
    """

    kind: EventKind
    ticket: Ticket | None = None
    candidates: Candidates | None = None
