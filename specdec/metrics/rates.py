"""Derives rates from raw counts; a rate with no denominator, or that does not apply, is None."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specdec.metrics.counters import RequestCounters
from specdec.metrics.loops import loop_share
from specdec.metrics.results import RequestResult, RunTotals
from specdec.metrics.times import time_metrics
from specdec.types import IntArray

POSITION_BUCKET = 32
"""Generated tokens per bucket of ``drafted_share_by_position``."""

LEAST_CONTEXT = 128
"""End of the first bucket of ``drafted_share_by_context``; bucket ends double from there."""

MAX_OVERRUN_SHARE = 0.02
"""Largest share of a paced run's work that may exceed the profile's times for it to count."""

_WORK = (
    *("steps", "target_passes", "prefill_passes", "target_rows", "draft_passes", "draft_rows"),
    *("draft_catch_up_rows", "draft_passes_by_level", "clock", "wall_s", "clock_s", "model_s"),
    *("model_calls", "wait_s", "latency"),
)
"""Counts of ``RunTotals`` that are metrics under the same name."""

_LOST = ("cut_tokens", "fill_steps", "flush_steps", "refill_steps")


def summarise(results: Sequence[RequestResult], totals: RunTotals) -> dict[str, Any]:
    """Returns all metrics of one repeat of a strategy by name (docs/metrics.md), as JSON values."""
    for result in results:
        check_invariants(result, level_per_step=totals.level_per_step)
    c = RequestCounters.sum([result.counters for result in results])
    new_tokens = sum(len(result.output) for result in results)
    read = totals.target_passes * totals.target_bytes + totals.draft_passes * totals.draft_bytes
    overruns, paced = _ratio(totals.overruns, totals.paced_pieces), totals.overruns is not None
    accepted, verified = judged(c, totals)
    # A cut removes the token after the path first, then accepted tokens from the path's end.
    cut_paths = sum(max(0, result.counters.cut_tokens - 1) for result in results)
    in_trees = None if totals.level_per_step else c.answers
    metrics = {
        "num_prompts": len(results),
        "new_tokens": new_tokens,
        "prompt_tokens": sum(result.num_prompt for result in results),
        "finish_reasons": dict(Counter(result.finish_reason for result in results)),
        **{name: getattr(totals, name) for name in _WORK},
        "steps_per_token": _ratio(totals.steps, new_tokens),
        "rows_per_target_pass": _ratio(totals.target_rows, totals.target_passes),
        "draft_passes_per_token": _ratio(totals.draft_passes, new_tokens),
        **time_metrics(results, clock_s=totals.clock_s),
        "answers": c.answers,
        "acceptance_length": _ratio(new_tokens, in_trees),
        "accepted_per_pass": _ratio(c.accepted - cut_paths, in_trees),
        "acceptance_rate": _ratio(accepted, c.proposed),
        "acceptance_rate_verified": _ratio(accepted, verified),
        "hit_rate": None if totals.whole_tree else _ratio(c.hits, c.answers),
        "accepted_tokens": accepted,
        "proposed_nodes": c.proposed,
        "wasted_nodes": max(0, c.proposed - accepted),
        **{name: getattr(c, name) for name in _LOST},
    }
    by_depth = Counter[int]() if totals.level_per_step else c.judged_by_depth
    histograms: dict[str, Mapping[int, float]] = {
        "acceptance_by_depth": {d: c.accepted_by_depth[d] / n for d, n in by_depth.items()},
        "judged_by_depth": by_depth,
        "path_lengths": c.path_lengths,
        "tokens_by_origin": Counter(origin for result in results for origin in result.origins),
        "drafted_share_by_position": drafted_by_position(results),
        "drafted_share_by_context": drafted_by_context(results),
    }
    return {
        **metrics,
        "speedup_law": None if totals.law is None else totals.law.of(metrics),
        **{name: {str(k): of[k] for k in sorted(of)} for name, of in histograms.items()},
        "speculative_decoding": speculative_decoding(c, whole_tree=totals.whole_tree),
        **_cost_metrics(totals),
        "relative_memory_traffic": _ratio(read, new_tokens * totals.target_bytes),
        "loop_share": loop_share(result.output for result in results),
        "overrun_share": overruns,
        "paced_counts": (overruns or 0.0) <= MAX_OVERRUN_SHARE if paced else None,
    }


def check_invariants(result: RequestResult, *, level_per_step: bool) -> None:
    """Asserts that the counts of one request agree with each other and with its output."""
    c, name = result.counters, f"request {result.id}"
    decided = len(result.output) + c.cut_tokens
    assert result.output or result.finish_reason == "cancelled", f"{name} finished without a token"
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
    """Returns the numbers of (accepted draft tokens, draft tokens that the target has judged).

    If trees are answered in parts, both include the hits: tokens that are accepted although their
    own answer is still in flight.
    """
    in_flight = 0 if totals.whole_tree else counters.hits
    return counters.accepted + in_flight, counters.verified + in_flight


def drafted_by_position(results: Sequence[RequestResult]) -> dict[int, float]:
    """Maps each bucket's first position to the share of its tokens that a source proposed."""
    buckets = [np.arange(len(r.origins)) // POSITION_BUCKET * POSITION_BUCKET for r in results]
    return _drafted_by(results, buckets)


def drafted_by_context(results: Sequence[RequestResult]) -> dict[int, float]:
    """Maps the (exclusive) end of each bucket of context lengths to its share of drafted tokens."""
    contexts = [r.num_prompt + np.arange(len(r.origins)) for r in results]
    # frexp returns the number of bits of an integer.
    return _drafted_by(results, [np.maximum(LEAST_CONTEXT, 1 << np.frexp(c)[1]) for c in contexts])


def _drafted_by(results: Sequence[RequestResult], buckets: Sequence[IntArray]) -> dict[int, float]:
    drafted = pd.Series([origin >= 0 for r in results for origin in r.origins], dtype=float)
    return drafted.groupby(np.concatenate([np.zeros(0, int), *buckets])).mean().to_dict()


def speculative_decoding(
    counters: RequestCounters, *, whole_tree: bool, each_step: bool = False
) -> dict[str, Any] | None:
    """Returns ``acceptance_keys`` of the counts; None without draft tokens or unless
    ``whole_tree``. ``each_step`` adds ``per_step_accepted``, if the counts are of one request.
    """
    drafted, lengths = counters.proposed, counters.path_lengths
    if not whole_tree or not drafted or not lengths:
        return None
    keys = acceptance_keys(lengths, drafted, max(counters.judged_by_depth, default=0))
    if each_step and len(counters.decided) == lengths.total():
        keys["per_step_accepted"] = [length - 1 for length in counters.decided]
    return keys


def acceptance_keys(lengths: Counter[int], drafted: int, deepest: int) -> dict[str, Any]:
    """Returns acceptance under the keys of vLLM's ``metrics.speculative_decoding`` (vLLM #48915,
    shared by SGLang and llama.cpp and read by ``specdec fit``).

    Args:
        lengths: number of decided tokens, at least 1 -> steps that decided as many.
        drafted: number of draft tokens submitted to the target (tree nodes without roots).
        deepest: depth of the deepest draft token that was judged.
    """
    steps = lengths.total()
    accepted = sum((length - 1) * count for length, count in lengths.items())
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": [lengths[j + 1] for j in range(max(lengths, default=0))],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": deepest,
    }


def _cost_metrics(totals: RunTotals) -> dict[str, Any]:
    overhead = bubbles = None
    # No model is called in replayed and synthetic runs.
    if totals.wall_s > 0 and totals.total_model_s + totals.wait_s > 0:
        overhead = totals.wall_s - totals.total_model_s - totals.wait_s
    if totals.stage_busy_s is not None and totals.clock_s > 0:
        busy = sorted(totals.stage_busy_s.items())
        bubbles = {str(rank): 1.0 - seconds / totals.clock_s for rank, seconds in busy}
    return {
        "overhead_share": _ratio(overhead, totals.wall_s),
        "overhead_ms_per_step": None if overhead is None else _ratio(overhead * 1e3, totals.steps),
        "bubble_share": bubbles,
        "draft_hidden_share": _ratio(totals.draft_hidden_s, totals.draft_total_s),
        "bytes_sent_per_step": _ratio(totals.bytes_sent, totals.steps),
        "mean_batch": _ratio(totals.request_steps, totals.steps),
        "kv_tokens_mean": _ratio(totals.kv_token_steps, totals.steps),
        "kv_tokens_peak": totals.kv_peak_tokens,
        "kv_tokens_budget": totals.kv_budget_tokens,
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
