"""Derives all rates from raw counts.

A rate is None if its denominator is zero or if it does not apply to the strategy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.metrics.engine_keys import speculative_decoding
from specdec.metrics.loops import loop_share
from specdec.metrics.results import RequestResult, RunTotals
from specdec.metrics.times import time_metrics

if TYPE_CHECKING:
    from specdec.metrics.counters import RequestCounters

POSITION_BUCKET = 32
"""Generated tokens per bucket of ``drafted_share_by_position``."""

LEAST_CONTEXT = 128
"""End of the first bucket of ``drafted_share_by_context``; bucket ends double from there."""

MAX_OVERRUN_SHARE = 0.02
"""A paced run counts if at most this share of its pieces of work took longer than planned."""


def summarise(results: Sequence[RequestResult], totals: RunTotals) -> dict[str, Any]:
    """Returns all metrics of one repeat of a strategy by name, as JSON values.

    docs/metrics.md defines them. Asserts that the counts are consistent.
    """
    for result in results:
        check_invariants(result, level_per_step=totals.level_per_step)
    new_tokens = sum(len(result.output) for result in results)
    read = totals.target_passes * totals.target_bytes + totals.draft_passes * totals.draft_bytes
    paced = totals.paced_pieces is not None and totals.overruns is not None
    overruns = _ratio(totals.overruns, totals.paced_pieces)
    return {
        "num_prompts": len(results),
        "new_tokens": new_tokens,
        "prompt_tokens": sum(result.num_prompt for result in results),
        "finish_reasons": dict(Counter(result.finish_reason for result in results)),
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
        **time_metrics(results, clock_s=totals.clock_s),
        **(acceptance := _acceptance_metrics(results, totals)),
        "speedup_law": None if totals.law is None else totals.law.of(acceptance),
        **_histograms(results, level_per_step=totals.level_per_step),
        "speculative_decoding": speculative_decoding(
            [result.counters for result in results], whole_tree=totals.whole_tree
        ),
        **_cost_metrics(totals),
        "relative_memory_traffic": _ratio(read, new_tokens * totals.target_bytes),
        "loop_share": loop_share(result.output for result in results),
        "clock": totals.clock,
        "overrun_share": overruns,
        "paced_counts": (overruns or 0.0) <= MAX_OVERRUN_SHARE if paced else None,
    }


def check_invariants(result: RequestResult, *, level_per_step: bool) -> None:
    """Asserts the relations between the counts of one request; tokens include those that were cut.

    Always: tokens = accepted + answers, and answers = hits + misses. With one level per step no
    token is accepted below an answered one, so tokens = hits + misses.
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


def judged(counters: RequestCounters, totals: RunTotals) -> tuple[int, int]:
    """Returns (accepted draft tokens, candidates judged by the target) of one request.

    If trees are answered in parts, a hit is an accepted draft token whose own answer is still in
    flight. Neither counter includes it, so it is added to both.
    """
    in_flight = 0 if totals.whole_tree else counters.hits
    return counters.accepted + in_flight, counters.verified + in_flight


def _acceptance_metrics(results: Sequence[RequestResult], totals: RunTotals) -> dict[str, Any]:
    counters = [result.counters for result in results]
    names = ("answers", "hits", "proposed")
    answers, hits, proposed = (sum(getattr(c, name) for c in counters) for name in names)
    accepted, verified = (sum(judged(c, totals)[i] for c in counters) for i in (0, 1))
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


def drafted_by_position(results: Sequence[RequestResult]) -> dict[int, float]:
    """Maps each bucket's first position to the share of its tokens that a source proposed."""
    drafted, emitted = Counter[int](), Counter[int]()
    for result in results:
        for position, origin in enumerate(result.origins):
            start = position // POSITION_BUCKET * POSITION_BUCKET
            emitted[start] += 1
            drafted[start] += origin >= 0
    return {start: drafted[start] / emitted[start] for start in sorted(emitted)}


def drafted_by_context(results: Sequence[RequestResult]) -> dict[int, float]:
    """Maps each bucket's (exclusive) end to the share of its tokens that a source proposed.

    Buckets are of context length, which is the number of prompt and output tokens before a token.
    """
    drafted, emitted = Counter[int](), Counter[int]()
    for result in results:
        for context, origin in enumerate(result.origins, start=result.num_prompt):
            end = max(LEAST_CONTEXT, 1 << context.bit_length())
            emitted[end] += 1
            drafted[end] += origin >= 0
    return {end: drafted[end] / emitted[end] for end in sorted(emitted)}


def _histograms(results: Sequence[RequestResult], *, level_per_step: bool) -> dict[str, Any]:
    accepted, judged, paths, origins = (Counter[int]() for _ in range(4))
    for result in results:
        if not level_per_step:
            accepted.update(result.counters.accepted_by_depth)
            judged.update(result.counters.judged_by_depth)
        paths.update(result.counters.path_lengths)
        origins.update(result.origins)
    histograms: dict[str, Mapping[int, float]] = {
        "acceptance_by_depth": {d: accepted[d] / judged[d] for d in judged},
        "judged_by_depth": judged,
        "path_lengths": paths,
        "tokens_by_origin": origins,
        "drafted_share_by_position": drafted_by_position(results),
        "drafted_share_by_context": drafted_by_context(results),
    }
    return {name: {str(k): of[k] for k in sorted(of)} for name, of in histograms.items()}


def _cost_metrics(totals: RunTotals) -> dict[str, Any]:
    # No model is called in replayed and synthetic runs.
    known = totals.wall_s > 0 and totals.total_model_s + totals.wait_s > 0
    overhead = totals.wall_s - totals.total_model_s - totals.wait_s
    bubbles = None
    if totals.stage_busy_s is not None and totals.clock_s > 0:
        busy = sorted(totals.stage_busy_s.items())
        bubbles = {str(rank): 1.0 - seconds / totals.clock_s for rank, seconds in busy}
    return {
        "wall_s": totals.wall_s,
        "clock_s": totals.clock_s,
        "model_s": dict(totals.model_s),
        "model_calls": dict(totals.model_calls),
        "wait_s": totals.wait_s,
        "overhead_share": overhead / totals.wall_s if known else None,
        "overhead_ms_per_step": _ratio(overhead * 1e3, totals.steps) if known else None,
        "bubble_share": bubbles,
        "draft_hidden_share": _ratio(totals.draft_hidden_s, totals.draft_total_s),
        "bytes_sent_per_step": _ratio(totals.bytes_sent, totals.steps),
        "mean_batch": _ratio(totals.request_steps, totals.steps),
        "kv_tokens_mean": _ratio(totals.kv_token_steps, totals.steps),
        "kv_tokens_peak": totals.kv_peak_tokens,
        "kv_tokens_budget": totals.kv_budget_tokens,
        "latency": totals.latency,
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
