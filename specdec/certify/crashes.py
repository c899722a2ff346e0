"""Locates the errors that a strategy raises during checks, and reports each of them once."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from specdec.certify.report import Check, Crash, error_text
from specdec.loop import decode
from specdec.state import RequestState

_ROLES = ("scheduler", "policy", "source", "verifier", "executor")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an error was raised: the file and line of the innermost frame, and the error's type."""

    kind: type[BaseException]
    file: str
    line: int


class Crashes:
    """The distinct errors of one run of checks, in the order in which they occurred."""

    def __init__(self) -> None:
        self._by_place: dict[_Place, Crash] = {}

    @property
    def found(self) -> tuple[Crash, ...]:
        return tuple(self._by_place.values())

    def check(self, name: str, error: Exception) -> Check:
        """Returns the failed check that ``error`` ended.

        An error from the same place as an earlier one only refers to the check that describes it.
        """
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        place = _Place(type(error), innermost.filename, innermost.lineno or 0)
        known = self._by_place.get(place)
        if known is not None:
            self._by_place[place] = replace(known, checks=(*known.checks, name))
            return Check(name, False, f"ended by the error of {known.checks[0]}")
        crash = _crash(name, error)
        self._by_place[place] = crash
        return Check(name, False, f"raised {crash.error}{crash.where}")


def _crash(check: str, error: Exception) -> Crash:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loop: Mapping[str, Any] = {}
    part, request, step, outermost = "", None, None, True
    for frame in frames:
        known = frame.f_locals
        if frame.f_code is decode.__code__:
            loop, step, part, outermost = known, int(known["state"].step), "decode loop", True
            continue
        owner = known.get("self")
        role = next((r for r in _ROLES if owner is not None and loop.get(r) is owner), None)
        if role is not None and outermost:
            part, outermost = f"{role} {type(owner).__name__}.{frame.f_code.co_name}", False
        request = next(_requests(frame), request)
    if request is None and loop:
        live = list(loop["state"].requests)
        request = live[0] if len(live) == 1 else None
    lines = traceback.format_exception(error)
    return Crash((check,), error_text(error), part, request, step, "".join(lines))


def _requests(frame: FrameType) -> Iterator[int]:
    """Yields ids of the requests that a function of the strategy was working on."""
    for name, value in frame.f_locals.items():
        if isinstance(value, RequestState):
            yield value.id
        elif name == "request_id" and isinstance(value, int):
            yield value
