"""Builds one row of a comparison: medians over repeats, ratios to ``ar``, equality of tokens.

``ar`` is plain decoding. Shape letters: P prompts that both strategies have finished.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.metrics.paired import paired_figures
from specdec.metrics.parity import lossless_against
from specdec.metrics.rates import summarise
from specdec.metrics.results import RequestResult, Run, RunTotals
from specdec.metrics.times import decode_phase, decode_speed

_LEVEL = 0.95  # coverage of bootstrap intervals
_RANGES = ("tokens_per_s", "tbt_ms_mean", "ttft_ms", "overhead_share")


def comparison_row(
    strategy: str,
    runs: Sequence[Run],
    ar_runs: Sequence[Run] | None = None,
    *,
    claims: str = "token",
    disturbed: Sequence[Collection[int]] = (),
) -> dict[str, Any]:
    """Returns one row of ``comparison.json`` from the repeats of a strategy.

    The row has every metric of ``summarise`` (medians over repeats), ``<name>_range`` = [minimum,
    maximum] of the main times, ``repeats``, and the ratios to ``ar`` that docs/metrics.md names.

    Args:
        ar_runs: runs of ``ar`` on the same prompts, by repeat; None if there are none.
        claims: what the verifier promises (``types.Lossless``); tokens are compared only under
            "token".
        disturbed: see ``paired_figures``.

    Raises:
        ValueError: there are no runs, or ``ar`` has another number of repeats.
    """
    if not runs:
        raise ValueError(f"{strategy}: no finished repeat to report")
    row: dict[str, Any] = {"strategy": strategy, "claims": str(claims), "repeats": len(runs)}
    summaries = [summarise(run.results, run.totals) for run in runs]
    row.update({name: _middle([s[name] for s in summaries]) for name in summaries[0]})
    for name in _RANGES:
        values = [s[name] for s in summaries if s[name] is not None]
        row[f"{name}_range"] = [min(values), max(values)] if values else None
    plain = pooled(ar_runs or ())
    parity = lossless_against(pooled(runs), plain, claims_tokens=str(claims) == "token")
    row["lossless"] = parity.lossless
    row["num_compared"] = parity.num_compared
    row["num_differing"] = len({d.id for d in parity.differing})
    row["differing"] = [asdict(d) | {"distance": None} for d in parity.differing]
    row["ties"] = []  # it and ``distance`` stay in the files: only ``certify`` measures distances
    row.update(_speedups(runs, ar_runs, disturbed))
    return row


def theoretical_speedup(run: Run, ar: Run) -> float | None:
    """Predicts the speed-up over ``ar`` from the run's own counts, on any clock and executor.

    With t the seconds per token of ``ar`` and L the executor's latency, a run takes turns * t / L
    seconds plus its drafting time (docs/metrics.md). Returns None if ``ar`` has no speed or an
    executor has no latency.
    """
    ar_speed, totals = decode_speed(ar.results), run.totals
    if not (totals.latency and ar.totals.latency):
        return None
    turns, ar_turns = _turns(totals), _turns(ar.totals)
    tokens, ar_tokens = (sum(len(result.output) for result in r.results) for r in (run, ar))
    if not ar_speed or not turns or not ar_turns or not tokens or not ar_tokens:
        return None
    drafting_s = totals.draft_total_s - (totals.draft_hidden_s or 0.0)
    seconds = turns / totals.latency / ar_speed + drafting_s
    return ar_turns / ar.totals.latency / ar_speed / ar_tokens * tokens / seconds


def _turns(totals: RunTotals) -> int:
    """Counts the loop's decoding turns: target passes, or pipeline steps other than prefill."""
    if totals.latency == 1:
        return totals.target_passes
    return totals.steps - totals.prefill_passes


def speed_ratio_interval(
    results: Sequence[RequestResult],
    ar_results: Sequence[RequestResult],
    *,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Returns the 95 % bootstrap interval of the ratio of decode speeds.

    Prompts that both sides have are resampled in pairs, after pooling the repeats of each prompt.
    Returns None with fewer than two such prompts or without times.
    """
    table = _paired(results, ar_results)
    if len(table) < 2 or not (table.sum(0) > 0).all():
        return None
    picks = np.random.default_rng(seed).integers(0, len(table), (num_resamples, len(table)))
    ratios = _ratios(table[picks].sum(1))
    low, high = np.quantile(ratios, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def pooled(runs: Sequence[Run]) -> list[RequestResult]:
    return [result for run in runs for result in run.results]


def prompt_speedups(runs: Sequence[Run], ar_runs: Sequence[Run]) -> npt.NDArray[np.float64]:
    """float64[P]: ratio of decode speeds per prompt, with repeats pooled."""
    return _ratios(_paired(pooled(runs), pooled(ar_runs)))


def _paired(
    results: Sequence[RequestResult], ar_results: Sequence[RequestResult]
) -> npt.NDArray[np.float64]:
    """float64[P, 4]: tokens, seconds, ``ar`` tokens and ``ar`` seconds of each prompt."""
    ours, plain = decoded_by_prompt(results), decoded_by_prompt(ar_results)
    common = sorted(ours.keys() & plain.keys())
    return np.array([(*ours[i], *plain[i]) for i in common], np.float64).reshape(-1, 4)


def _ratios(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Divides the speeds in rows of ``_paired``; omits rows without tokens or seconds."""
    table = table[(table > 0).all(1)]
    return (table[:, 0] / table[:, 1]) / (table[:, 2] / table[:, 3])


def decoded_by_prompt(results: Sequence[RequestResult]) -> dict[int, tuple[float, float]]:
    """Maps each prompt id to the (tokens, seconds) of its decode phases, summed over repeats."""
    totals: dict[int, tuple[float, float]] = {}
    for result in results:
        phase = decode_phase(result)
        tokens, seconds = totals.get(result.id, (0.0, 0.0))
        totals[result.id] = (tokens + phase.tokens, seconds + phase.seconds)
    return totals


def _speedups(
    runs: Sequence[Run], ar_runs: Sequence[Run] | None, disturbed: Sequence[Collection[int]]
) -> dict[str, Any]:
    names = ("speedup_wall", "speedup_wall_range", "speedup_wall_interval", "speedup_theoretical")
    speedups: dict[str, Any] = dict.fromkeys(names) | paired_figures((), ())
    if not ar_runs:
        return speedups
    if len(ar_runs) != len(runs):
        raise ValueError(
            f"{len(runs)} repeats cannot be paired with {len(ar_runs)} repeats of ar; give every"
            " strategy the same number of repeats"
        )
    pairs = list(zip(runs, ar_runs, strict=True))
    if any(run.totals.clock != ar.totals.clock for run, ar in pairs):
        return speedups  # times of different clocks have no ratio
    speeds = [(decode_speed(run.results), decode_speed(ar.results)) for run, ar in pairs]
    ratios = [speed / plain for speed, plain in speeds if speed is not None and plain]
    if ratios:
        interval = speed_ratio_interval(pooled(runs), pooled(ar_runs))
        values = (median(ratios), [min(ratios), max(ratios)], list(interval) if interval else None)
        speedups |= dict(zip(names, values, strict=False))
    speedups |= paired_figures(runs, ar_runs, disturbed)
    theories = [theoretical_speedup(run, ar) for run, ar in pairs]
    known = [theory for theory in theories if theory is not None]
    speedups["speedup_theoretical"] = median(known) if known else None
    return speedups


def _middle(values: list[Any]) -> Any:
    """Takes medians of numbers, per key in histograms; other values come from the first repeat."""
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values if value for key in value)
        return {k: _middle([v[k] for v in values if v and k in v]) for k in keys}
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if not numbers:
        return first
    if all(isinstance(v, int) for v in numbers) and len(set(numbers)) == 1:
        return first
    return median(numbers)
