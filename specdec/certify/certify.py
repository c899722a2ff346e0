import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from specdec.certify import parity
from specdec.certify.invariants import cache_invariant, tree_invariant
from specdec.certify.laws import distribution
from specdec.certify.numerics import configured_law, exact_dtype, numerics
from specdec.certify.report import Check, Crash, Outcome, Report, Skipped
from specdec.certify.sampler import sampler
from specdec.certify.subject import Build, CannotCompose, Subject, hang_limit, rank_groups
from specdec.compose.borders import BrokenPart
from specdec.compose.workbench import compose
from specdec.distributed.rank_groups import GroupHandle
from specdec.errors import UserError
from specdec.loop import decode
from specdec.parts.fields import did_you_mean
from specdec.state import RequestState
from specdec.types import Lossless

_WITH_CONFIGURED_MODELS = (numerics, configured_law, exact_dtype)
_OF_LOSSLESS = (parity.stop_rules, parity.long_request, *_WITH_CONFIGURED_MODELS)
CHECKS: dict[str, Callable[[Subject], Outcome]] = {
    check.__name__: check
    for check in (
        *(parity.greedy_parity, parity.sampled_parity, distribution),
        *(cache_invariant, tree_invariant),
        *(parity.stop_rules, parity.long_request, parity.batch_independence),
        *(sampler, *_WITH_CONFIGURED_MODELS),
    )
}
"""Check functions by name, in the order in which they run (docs/verify.md describes them)."""

DEPTHS = ("standard", "full")
_HANG_S = 120.0  # without a step; a step of small models takes milliseconds
_ROLES = ("scheduler", "policy", "source", "verifier", "executor")  # names in the decode loop
_LOOP = "decode loop"


def certify(
    cfg: Mapping[str, Any],
    *,
    build: Build = compose,
    checks: Sequence[str] | None = None,
    depth: str = "standard",
    on_check: Callable[[Check], None] | None = None,
    fail_fast: bool = False,
) -> Report:
    """Runs ``checks`` (names, default all) on ``cfg``, a resolved configuration as plain values; a
    check in which the strategy raises has failed. Depth "full" has more requests.

    ``build`` makes the parts for a pair of models; UserError if it cannot. ``on_check`` is called
    after each check; ``fail_fast`` stops after a failed one.
    """
    if depth not in DEPTHS:
        raise UserError(f"depth={depth} is not one of {', '.join(DEPTHS)}")
    if unknown := [name for name in checks or () if name not in CHECKS]:
        raise UserError(f"checks: {unknown[0]} is unknown: {did_you_mean(unknown[0], CHECKS)}")
    start = perf_counter()
    done, crashes = list[Check](), dict[Any, Crash]()
    threads = torch.get_num_threads()
    with ExitStack() as kept:  # ranks that the checks use in turn
        kept.callback(torch.set_num_threads, threads)
        for num_ranks, number in rank_groups(cfg):
            handle = GroupHandle(num_ranks, threads=cfg.get("threads"), number=number)
            kept.callback(handle.release)
        subject = Subject(cfg, build=build, full=depth == "full")
        for name in CHECKS if checks is None else checks:
            check = CHECKS[name]
            # For small models the wait for a second thread costs more than it saves.
            is_small = check not in _WITH_CONFIGURED_MODELS
            torch.set_num_threads(1 if is_small else cfg.get("threads") or threads)
            try:
                if subject.claims is Lossless.LOSSY and check in _OF_LOSSLESS:
                    raise Skipped("a lossy output has no reference")
                with hang_limit(_HANG_S * (1 if is_small else 10)):
                    done.append(Check(name, *check(subject)))
            except Skipped as reason:
                done.append(Check(name, None, str(reason)))
            except (CannotCompose, BrokenPart):
                raise
            except Exception as error:  # a strategy that raises is not lossless, whatever it raises
                done.append(Check(name, False, _crashed(name, error, crashes)))
            if on_check is not None:
                on_check(done[-1])
            hung = any(crash.hung for crash in crashes.values())
            if hung or (fail_fast and done[-1].passed is False):
                break  # what hangs once would hang in every check
    seconds, errors = perf_counter() - start, tuple(crashes.values())
    return Report(subject.name, subject.claims, tuple(done), seconds, errors)


def _crashed(name: str, error: Exception, crashes: dict[Any, Crash]) -> str:
    """Returns the detail of a check that raised; for a repeated error it names the first check."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    line = type(error), innermost.filename, innermost.lineno
    if known := crashes.get(line):
        crashes[line] = replace(known, checks=(*known.checks, name))
        return f"ended by the error of {known.checks[0]}"
    crash = crashes[line] = _crash(name, error)
    return f"raised {crash.error}{crash.where}"


def _crash(check: str, error: Exception) -> Crash:
    loop: Mapping[str, Any] = {}
    part, request, step = "", None, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        known = frame.f_locals
        if frame.f_code is decode.__code__:
            loop, step, part = known, int(known["state"].step), _LOOP
            continue
        owner = known.get("self")
        role = next((r for r in _ROLES if owner is not None and loop.get(r) is owner), None)
        if role is not None and part == _LOOP:  # the outermost part of the loop
            part = f"{role} {type(owner).__name__}.{frame.f_code.co_name}"
        for name, value in known.items():
            if isinstance(value, RequestState):
                request = value.id
                break
            if name == "request_id" and isinstance(value, int):
                request = value
                break
    if request is None and loop and len(loop["state"].requests) == 1:
        (request,) = loop["state"].requests
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Crash((check,), text, part, request, step, "".join(traceback.format_exception(error)))
