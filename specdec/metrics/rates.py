"""Every rate of the product, derived from raw counts, in this one place.

A value is None where it is undefined: a zero denominator, or a notion that the strategy lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec.metrics.loops import loop_share
from specdec.metrics.results import RequestResult, RunTotals
from specdec.metrics.times import time_metrics

if TYPE_CHECKING:
    from specdec.metrics.counters import RequestCounters

POSITION_BUCKET = 32
"""Generated tokens per bucket of ``drafted_share_by_position``."""

MAX_OVERRUN_SHARE = 0.02
"""Overruns per piece of paced work up to which a run's times count."""


def summarise(results: Sequence[RequestResult], totals: RunTotals) -> dict[str, Any]:
    """All metrics of one run (one strategy, one repeat) by their names.

    Args:
        results: its finished requests.
        totals: its raw totals.

    Returns:
        JSON-ready values; see the functions below for the definitions.

    Raises:
        AssertionError: the counts contradict each other.
    """
    for result in results:
        check_invariants(result, level_per_step=totals.level_per_step)
    new_tokens = sum(len(result.output) for result in results)
    return {
        "num_prompts": len(results),
        "new_tokens": new_tokens,
        "prompt_tokens": sum(result.num_prompt for result in results),
        "finish_reasons": dict(Counter(result.finish_reason for result in results)),
        **_pass_metrics(new_tokens, totals),
        **time_metrics(results, clock_s=totals.clock_s),
        **(acceptance := _acceptance_metrics(results, totals)),
        "speedup_law": None if totals.law is None else totals.law.of(acceptance),
        **_histograms(results, level_per_step=totals.level_per_step),
        **_cost_metrics(totals),
        "relative_memory_traffic": relative_memory_traffic(new_tokens, totals),
        "loop_share": loop_share(result.output for result in results),
        "clock": totals.clock,
        **_pace_metrics(totals),
    }


def check_invariants(result: RequestResult, *, level_per_step: bool) -> None:
    """Asserts what must hold between the counts of one request, cuts added back.

    Whole-tree and multi-level answers: emitted = accepted + answers. One level per step: also
    emitted = hits + misses. Every answer is a hit or a miss; accepted tokens lie on paths.
    """
    c = result.counters
    decided = len(result.output) + c.cut_tokens
    name = f"request {result.id}"
    if result.finish_reason != "cancelled":
        assert result.output, f"{name} finished without a token"
    assert c.hits + c.misses == c.answers, f"{name}: {c.hits} + {c.misses} != {c.answers} answers"
    assert decided == c.accepted + c.answers, (
        f"{name}: {decided} tokens decided, {c.accepted} accepted + {c.answers} answers"
    )
    if level_per_step:
        assert c.accepted == 0, f"{name}: {c.accepted} accepted below an answer of one token"
    assert sum(c.path_lengths.values()) == c.answers, f"{name}: path lengths miss answers"
    assert sum(k * v for k, v in c.path_lengths.items()) == decided, f"{name}: path lengths"
    assert sum(c.accepted_by_depth.values()) == c.accepted, f"{name}: accepted by depth"
    late = [d for d, n in c.accepted_by_depth.items() if n > c.judged_by_depth[d]]
    assert not late, f"{name}: more accepted than judged at depths {late}"


def relative_memory_traffic(new_tokens: int, totals: RunTotals) -> float | None:
    """Weights read, relative to one target pass per token.

    (target_passes B_t + draft_passes B_d) / (emitted B_t), B = bytes of weights.
    """
    read = totals.target_passes * totals.target_bytes + totals.draft_passes * totals.draft_bytes
    return _ratio(read, new_tokens * totals.target_bytes)


def _pass_metrics(new_tokens: int, totals: RunTotals) -> dict[str, Any]:
    return {
        "steps": totals.steps,
        "steps_per_token": _ratio(totals.steps, new_tokens),
        "target_passes": totals.target_passes,
        "prefill_passes": totals.prefill_passes,
        "target_rows": totals.target_rows,
        "rows_per_target_pass": _ratio(totals.target_rows, totals.target_passes),
        "draft_passes": totals.draft_passes,
        "draft_rows": totals.draft_rows,
        "draft_catch_up_rows": totals.draft_catch_up_rows,
        "draft_passes_by_level": dict(totals.draft_passes_by_level),
        "draft_passes_per_token": _ratio(totals.draft_passes, new_tokens),
    }


def judged(counters: RequestCounters, totals: RunTotals) -> tuple[int, int]:
    """(accepted draft tokens, candidates that the target judged) of one request.

    Where levels are in flight a hit is an accepted draft token as well, whose own answer is still
    to come; a verifier's ``num_verified`` leaves out the child that was hit, so it is added.
    """
    in_flight = 0 if totals.whole_tree else counters.hits
    return counters.accepted + in_flight, counters.verified + in_flight


def _acceptance_metrics(results: Sequence[RequestResult], totals: RunTotals) -> dict[str, Any]:
    """Acceptance, by the two customs of the literature where they differ.

    ``acceptance_length``: emitted tokens per answer, bonus or correction included;
    ``accepted_per_pass``: without it. Cut tokens are in neither. With one request at a time an
    answer is a target pass. Both None for one level per step, where an answer emits one token.
    ``acceptance_rate``: accepted / proposed draft tokens; ``acceptance_rate_verified``: accepted /
    candidates that the target judged (``judged``).
    ``hit_rate``: answers whose token was in the tree; None where the whole tree is answered.
    """
    counters = [result.counters for result in results]
    answers = sum(c.answers for c in counters)
    hits = sum(c.hits for c in counters)
    proposed = sum(c.proposed for c in counters)
    pairs = [judged(c, totals) for c in counters]
    accepted, verified = (sum(pair[i] for pair in pairs) for i in (0, 1))
    # A cut removes the token after the path first, then accepted tokens from the path's end.
    accepted_emitted = sum(c.accepted - max(0, c.cut_tokens - 1) for c in counters)
    emitted = sum(len(result.output) for result in results)
    by_level = totals.level_per_step
    return {
        "answers": answers,
        "acceptance_length": None if by_level else _ratio(emitted, answers),
        "accepted_per_pass": None if by_level else _ratio(accepted_emitted, answers),
        "acceptance_rate": _ratio(accepted, proposed),
        "acceptance_rate_verified": _ratio(accepted, verified),
        "hit_rate": None if totals.whole_tree else _ratio(hits, answers),
        "accepted_tokens": accepted,
        "proposed_nodes": proposed,
        "wasted_nodes": max(0, proposed - accepted),
        "cut_tokens": sum(c.cut_tokens for c in counters),
        "fill_steps": sum(c.fill_steps for c in counters),
        "flush_steps": sum(c.flush_steps for c in counters),
        "refill_steps": sum(c.refill_steps for c in counters),
    }


def _histograms(results: Sequence[RequestResult], *, level_per_step: bool) -> dict[str, Any]:
    """Counts by depth (none where every answer is at depth 0), by position and by origin."""
    accepted: Counter[int] = Counter()
    judged: Counter[int] = Counter()
    paths: Counter[int] = Counter()
    origins: Counter[int] = Counter()
    drafted: Counter[int] = Counter()
    emitted: Counter[int] = Counter()
    for result in results:
        if not level_per_step:
            accepted.update(result.counters.accepted_by_depth)
            judged.update(result.counters.judged_by_depth)
        paths.update(result.counters.path_lengths)
        origins.update(result.origins)
        for start in range(0, len(result.origins), POSITION_BUCKET):
            bucket = result.origins[start : start + POSITION_BUCKET]
            emitted[start] += len(bucket)
            drafted[start] += sum(origin >= 0 for origin in bucket)
    return {
        "acceptance_by_depth": {str(d): accepted[d] / judged[d] for d in sorted(judged)},
        "judged_by_depth": {str(d): judged[d] for d in sorted(judged)},
        "path_lengths": {str(k): paths[k] for k in sorted(paths)},
        "tokens_by_origin": {str(k): origins[k] for k in sorted(origins)},
        "drafted_share_by_position": {str(s): drafted[s] / emitted[s] for s in sorted(emitted)},
    }


def _cost_metrics(totals: RunTotals) -> dict[str, Any]:
    """Where the time went.

    ``overhead_share``: the controller's wall time outside model calls and declared waits, over
    that wall time, None where no model was called (replayed and synthetic runs);
    ``overhead_ms_per_step`` the same per step. ``bubble_share``: per stage, the
    share of the run's clock in which it did not work. ``draft_hidden_share``: draft time that
    passed while the target was busy. ``mean_batch``: requests open per step; ``kv_tokens_mean``,
    ``kv_tokens_peak``: tokens and nodes that the target's first stage held for them.
    """
    overhead = totals.wall_s - totals.total_model_s - totals.wait_s
    known = totals.wall_s > 0 and totals.total_model_s + totals.wait_s > 0
    bubbles = None
    if totals.stage_busy_s is not None and totals.clock_s > 0:
        busy = sorted(totals.stage_busy_s.items())
        bubbles = {str(rank): 1.0 - seconds / totals.clock_s for rank, seconds in busy}
    hidden = None
    if totals.draft_hidden_s is not None:
        hidden = _ratio(totals.draft_hidden_s, totals.draft_total_s)
    sent = totals.bytes_sent
    return {
        "wall_s": totals.wall_s,
        "clock_s": totals.clock_s,
        "model_s": dict(totals.model_s),
        "model_calls": dict(totals.model_calls),
        "wait_s": totals.wait_s,
        "overhead_share": overhead / totals.wall_s if known else None,
        "overhead_ms_per_step": _ratio(overhead * 1e3, totals.steps) if known else None,
        "bubble_share": bubbles,
        "draft_hidden_share": hidden,
        "bytes_sent_per_step": None if sent is None else _ratio(sent, totals.steps),
        "mean_batch": _ratio(totals.request_steps, totals.steps),
        "kv_tokens_mean": _ratio(totals.kv_token_steps, totals.steps),
        "kv_tokens_peak": totals.kv_peak_tokens,
        "kv_tokens_budget": totals.kv_budget_tokens,
        "latency": totals.latency,
    }


def _pace_metrics(totals: RunTotals) -> dict[str, Any]:
    """Whether a paced run kept its pace.

    ``overrun_share``: pieces of work that took longer than the profile says, over all pieces;
    ``paced_counts``: whether they are few enough for the run's times to count. None on other
    clocks.
    """
    share = counts = None
    if totals.paced_pieces is not None and totals.overruns is not None:
        share = _ratio(totals.overruns, totals.paced_pieces)
        counts = share is None or share <= MAX_OVERRUN_SHARE
    return {"overrun_share": share, "paced_counts": counts}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
