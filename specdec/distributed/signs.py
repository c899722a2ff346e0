"""Keys of the store under which ranks leave signs for rank 0."""

from __future__ import annotations

BEAT_S = 0.5
"""Seconds between a rank's signs of life."""


def up(rank: int) -> str:
    """The rank has been started."""
    return f"up/{rank}"


def ready(session: int, rank: int) -> str:
    """The rank has loaded its part of a session."""
    return f"ready/{session}/{rank}"


def beat(rank: int) -> str:
    """A number that grows, and what the rank is at."""
    return f"beat/{rank}"


def failed(rank: int) -> str:
    """Why the rank ends."""
    return f"failed/{rank}"


def report(session: int, number: int, rank: int) -> str:
    """What the rank was asked to report."""
    return f"report/{session}/{number}/{rank}"
