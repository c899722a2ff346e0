from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from specdec.certify.crashes import Crashes
from specdec.certify.exact_dtype import exact_dtype
from specdec.certify.invariants import cache_invariant, draft_rows, tree_invariant
from specdec.certify.laws import distribution
from specdec.certify.long_request import long_request
from specdec.certify.numerics import CannotCompose, numerics
from specdec.certify.parity import batch_independence, greedy_parity, sampled_parity, stop_rules
from specdec.certify.report import Check, Report
from specdec.certify.sampler import sampler
from specdec.certify.subject import Build, Subject, num_ranks
from specdec.compose.build import compose
from specdec.distributed.rank_groups import keep_ranks
from specdec.errors import UserError

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
    "exact_dtype": exact_dtype,
}
"""Check functions by name, in the order in which they run (docs/verify.md describes them)."""

DEPTHS = ("standard", "full")


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
    with keep_ranks(num_ranks(cfg), threads=cfg.get("threads")):
        subject = Subject(cfg, build=build, full=depth == "full")
        for name in CHECKS if checks is None else checks:
            outcomes.append(_run_check(name, subject, crashes))
            if on_check is not None:
                on_check(outcomes[-1])
            if fail_fast and outcomes[-1].passed is False:
                break
    return Report(
        subject.name, subject.claims, tuple(outcomes), perf_counter() - start, crashes.found
    )


def _run_check(name: str, subject: Subject, crashes: Crashes) -> Check:
    try:
        return CHECKS[name](subject)
    except CannotCompose:
        raise
    except Exception as error:  # a strategy that raises is not lossless, whatever it raises
        return crashes.check(name, error)
