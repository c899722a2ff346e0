from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specdec.types.nodes import Candidates, Nodes


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A draft pass in flight, which expands ``nodes``.

    Attributes:
        due_s: the time on the run's clock at which the pass ends; None if only polling tells.
        level: the index of the model that runs the pass (0 is the draft); see ``Events.start``.
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

    ``ticket`` is the draft pass that ended. ``candidates`` are those of a pass of level 1 or more;
    those of level 0 are in the trees.
    """

    kind: EventKind
    ticket: Ticket | None = None
    candidates: Candidates | None = None
