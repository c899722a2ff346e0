from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from types import FrameType
from typing import Any

from specdec.certify.invariants import cache_invariant, draft_rows, tree_invariant
from specdec.certify.laws import distribution
from specdec.certify.numerics import CannotCompose, configured_law, exact_dtype, numerics
from specdec.certify.parity import (
    batch_independence,
    greedy_parity,
    long_request,
    sampled_parity,
    stop_rules,
)
from specdec.certify.report import Check, Crash, Report, error_text
from specdec.certify.sampler import sampler
from specdec.certify.subject import Build, Subject, hang_limit, rank_groups
from specdec.compose.borders import BrokenPart
from specdec.compose.workbench import compose
from specdec.distributed.rank_groups import GroupHandle
from specdec.errors import UserError
from specdec.loop import decode
from specdec.state import RequestState

CHECKS: dict[str, Callable[[Subject], Check]] = {
    "greedy_parity": greedy_parity,
    "sampled_parity": sampled_parity,
    "distribution": distribution,
    "cache_invariant": cache_invariant,
    "tree_invariant": tree_invariant,
    "draft_rows": draft_rows,
    "stop_rules": stop_rules,
    "long_request": long_request,
    "batch_independence": batch_independence,
    "sampler": sampler,
    "numerics": numerics,
    "configured_law": configured_law,
    "exact_dtype": exact_dtype,
}
"""Check functions by name, in the order in which they run (docs/verify.md describes them)."""

DEPTHS = ("standard", "full")
_HANG_S = 120.0  # without a step; a step of small models takes milliseconds
_WITH_CONFIGURED_MODELS = ("numerics", "configured_law", "exact_dtype")
_ROLES = ("scheduler", "policy", "source", "verifier", "executor")


def certify(
    cfg: Mapping[str, Any],
    *,
    build: Build = compose,
    checks: Sequence[str] | None = None,
    depth: str = "standard",
    on_check: Callable[[Check], None] | None = None,
    fail_fast: bool = False,
) -> Report:
    """Runs the checks on one configuration, the resolved plain one of ``specdec run``.

    A check fails if the strategy raises in it; its detail names the error, or the check that met
    the same error first. A configuration that cannot be composed is a UserError.

    Args:
        build: builds the parts of a configuration on a pair.
        checks: names of the checks to run (default: all).
        depth: "standard", or "full" for more requests, longer outputs, a larger vocabulary and
            every family that can have a sliding window.
        on_check: called with each outcome.
        fail_fast: stop after the first check that fails.
    """
    if depth not in DEPTHS:
        raise UserError(f"depth={depth} is not one of {', '.join(DEPTHS)}")
    start = perf_counter()
    outcomes, crashes = list[Check](), Crashes()
    with ExitStack() as kept:  # ranks that the checks use in turn
        for num_ranks, number in rank_groups(cfg):
            handle = GroupHandle(num_ranks, threads=cfg.get("threads"), number=number)
            kept.callback(handle.release)
        subject = Subject(cfg, build=build, full=depth == "full")
        for name in CHECKS if checks is None else checks:
            outcomes.append(_run_check(name, subject, crashes))
            if on_check is not None:
                on_check(outcomes[-1])
            hung = any(name in crash.checks for crash in crashes.found if crash.hung)
            if hung or (fail_fast and outcomes[-1].passed is False):
                break  # what hangs once would hang in every check
    return Report(
        subject.name, subject.claims, tuple(outcomes), perf_counter() - start, crashes.found
    )


def _run_check(name: str, subject: Subject, crashes: Crashes) -> Check:
    seconds = _HANG_S * (10 if name in _WITH_CONFIGURED_MODELS else 1)
    try:
        with hang_limit(seconds):
            return CHECKS[name](subject)
    except (CannotCompose, BrokenPart):
        raise
    except Exception as error:  # a strategy that raises is not lossless, whatever it raises
        return crashes.check(name, error)


class Crashes:
    """The distinct errors of one run of checks, in the order in which they occurred."""

    def __init__(self) -> None:
        self._by_line: dict[tuple[type[Exception], str, int | None], Crash] = {}

    @property
    def found(self) -> tuple[Crash, ...]:
        return tuple(self._by_line.values())

    def check(self, name: str, error: Exception) -> Check:
        """Returns the failed check that ``error`` ended.

        An error from the same line as an earlier one only refers to the check that describes it.
        """
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        line = type(error), innermost.filename, innermost.lineno
        known = self._by_line.get(line)
        if known is not None:
            self._by_line[line] = replace(known, checks=(*known.checks, name))
            return Check(name, False, f"ended by the error of {known.checks[0]}")
        crash = _crash(name, error)
        self._by_line[line] = crash
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
