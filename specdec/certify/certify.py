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
from specdec.certify.numerics import configured_law, exact_dtype, numerics
from specdec.certify.parity import (
    batch_independence,
    greedy_parity,
    long_request,
    sampled_parity,
    stop_rules,
)
from specdec.certify.report import Check, Crash, Report
from specdec.certify.sampler import sampler
from specdec.certify.subject import Build, CannotCompose, Subject, hang_limit, rank_groups
from specdec.compose.borders import BrokenPart
from specdec.compose.workbench import compose
from specdec.distributed.rank_groups import GroupHandle
from specdec.errors import UserError
from specdec.loop import decode
from specdec.state import RequestState

_WITH_CONFIGURED_MODELS = (numerics, configured_law, exact_dtype)
CHECKS: dict[str, Callable[[Subject], Check]] = {
    check.__name__: check
    for check in (
        *(greedy_parity, sampled_parity, distribution, cache_invariant, tree_invariant, draft_rows),
        *(stop_rules, long_request, batch_independence, sampler, *_WITH_CONFIGURED_MODELS),
    )
}
"""Check functions by name, in the order in which they run (docs/verify.md describes them)."""

Line = tuple[type[Exception], str, int | None]
DEPTHS = ("standard", "full")
_HANG_S = 120.0  # without a step; a step of small models takes milliseconds
_ROLES = ("scheduler", "policy", "source", "verifier", "executor")  # names in the decode loop


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
    the same error first. A configuration that cannot be composed is a UserError. ``build`` builds
    the parts of a configuration on a pair; ``on_check`` is called with each outcome.
    """
    if depth not in DEPTHS:
        raise UserError(f"depth={depth} is not one of {', '.join(DEPTHS)}")
    start = perf_counter()
    outcomes, crashes = list[Check](), dict[Line, Crash]()
    with ExitStack() as kept:  # ranks that the checks use in turn
        for num_ranks, number in rank_groups(cfg):
            handle = GroupHandle(num_ranks, threads=cfg.get("threads"), number=number)
            kept.callback(handle.release)
        subject = Subject(cfg, build=build, full=depth == "full")
        for name in CHECKS if checks is None else checks:
            slow = CHECKS[name] in _WITH_CONFIGURED_MODELS
            try:
                with hang_limit(_HANG_S * (10 if slow else 1)):
                    outcomes.append(CHECKS[name](subject))
            except (CannotCompose, BrokenPart):
                raise
            except Exception as error:  # a strategy that raises is not lossless, whatever it raises
                outcomes.append(_failed(name, error, crashes))
            if on_check is not None:
                on_check(outcomes[-1])
            if any(crash.hung for crash in crashes.values()) or (
                fail_fast and outcomes[-1].passed is False
            ):
                break  # what hangs once would hang in every check
    seconds, errors = perf_counter() - start, tuple(crashes.values())
    return Report(subject.name, subject.claims, tuple(outcomes), seconds, errors)


def _failed(name: str, error: Exception, crashes: dict[Line, Crash]) -> Check:
    """An error from the same line as an earlier one refers to the check that describes it."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    line = type(error), innermost.filename, innermost.lineno
    known = crashes.get(line)
    if known is not None:
        crashes[line] = replace(known, checks=(*known.checks, name))
        return Check(name, False, f"ended by the error of {known.checks[0]}")
    crash = crashes[line] = _crash(name, error)
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
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Crash((check,), text, part, request, step, "".join(lines))


def _requests(frame: FrameType) -> Iterator[int]:
    for name, value in frame.f_locals.items():
        if isinstance(value, RequestState):
            yield value.id
        elif name == "request_id" and isinstance(value, int):
            yield value
