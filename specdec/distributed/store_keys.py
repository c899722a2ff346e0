"""Keys of the rendezvous store under which ranks report their state to rank 0."""

from __future__ import annotations

HEARTBEAT_S = 1.0

ANY_FAILED = "failed"
"""This key is set after the first ``failed`` of any rank."""


def started(rank: int) -> str:
    """This key is set when the rank's process runs."""
    return f"started/{rank}"


def ready(session: int, rank: int) -> str:
    """This key is set when the rank has loaded its part of a session."""
    return f"ready/{session}/{rank}"


def heartbeat(rank: int) -> str:
    """Its value is JSON [counter, name of the rank's current operation]."""
    return f"heartbeat/{rank}"


def failed(rank: int) -> str:
    """Its value says why the rank ended, as JSON (``worker.serve``)."""
    return f"failed/{rank}"


def captured(number: int, rank: int) -> str:
    """This key is set when the rank has captured its CUDA graphs before timed run ``number``."""
    return f"captured/{number}/{rank}"


def report(session: int, number: int, rank: int) -> str:
    """Its value is the rank's answer to report request ``number``, as JSON."""
    return f"report/{session}/{number}/{rank}"
