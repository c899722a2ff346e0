"""Runs every check on one configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from specdec.certify.invariants import cache_invariant, draft_rows, tree_invariant
from specdec.certify.laws import distribution
from specdec.certify.numerics import numerics
from specdec.certify.parity import batch_independence, greedy_parity, sampled_parity, stop_rules
from specdec.certify.report import Check, Report
from specdec.certify.subject import Build, Subject, num_ranks
from specdec.compose.build import compose
from specdec.distributed.rank_groups import keep_ranks

CHECKS: dict[str, Callable[[Subject], Check]] = {
    "greedy_parity": greedy_parity,
    "sampled_parity": sampled_parity,
    "distribution": distribution,
    "cache_invariant": cache_invariant,
    "tree_invariant": tree_invariant,
    "draft_rows": draft_rows,
    "stop_rules": stop_rules,
    "batch_independence": batch_independence,
    "numerics": numerics,
}
"""Name -> check, in the order in which they run."""


def certify(
    cfg: Mapping[str, Any],
    *,
    build: Build = compose,
    checks: Sequence[str] | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Certifies a configuration.

    Args:
        cfg: resolved plain configuration, as ``specdec run`` hands it to the engine.
        build: makes the parts of a configuration on a pair.
        checks: names of those to run; all where None.
        on_check: told of each outcome.

    Returns:
        The report. A check during which the strategy raised has failed; its detail names the error.

    Raises:
        UserError: for a configuration that cannot be composed, and for transformers' own
            strategies.
    """
    start = perf_counter()
    found = []
    with keep_ranks(num_ranks(cfg), threads=cfg.get("threads")):
        subject = Subject(cfg, build=build)
        for name in CHECKS if checks is None else checks:
            found.append(run_check(name, subject))
            if on_check is not None:
                on_check(found[-1])
    return Report(subject.name, subject.claims, tuple(found), perf_counter() - start)


def run_check(name: str, subject: Subject) -> Check:
    """One check, whatever happens in it."""
    try:
        return CHECKS[name](subject)
    except Exception as error:  # a strategy that breaks down is not lossless, however it does
        words = " ".join(str(error).split())
        return Check(name, False, f"broke down: {type(error).__name__}: {words[:300]}")
