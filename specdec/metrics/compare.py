"""One row of a comparison: medians over repeats, ratios to ``ar``, parity."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.metrics.parity import Divergence, Parity, lossless_against
from specdec.metrics.rates import summarise
from specdec.metrics.results import RequestResult, Run, RunTotals
from specdec.metrics.times import decode_phase, decode_speed

_RANGES = ("tokens_per_s", "tbt_ms_mean", "ttft_ms", "overhead_share")


def comparison_row(
    strategy: str,
    runs: Sequence[Run],
    ar_runs: Sequence[Run] | None = None,
    *,
    claims: str = "token",
    parity: Parity | None = None,
) -> dict[str, Any]:
    """Makes one row of ``comparison.json``.

    Every metric of ``summarise``, by median over the repeats; ``<name>_range`` = [least, most] for
    the main times; ``repeats``; and against the ``ar`` row of the same run: ``lossless``,
    ``num_differing``, ``differing``, ``ties``, ``speedup_wall`` (median over repeats of the ratio
    of tokens_per_s within a repeat), ``speedup_wall_range``, ``speedup_wall_interval`` (95 %
    bootstrap over prompts) and ``speedup_theoretical``.

    Args:
        strategy: its name.
        runs: one per repeat.
        ar_runs: plain decoding's runs, repeat by repeat the same prompts; None where there is
            no such row.
        claims: what the verifier promises (``types.Lossless``); tokens are compared under
            "token" only.
        parity: a comparison already made (with distances); None to make it here.

    Raises:
        ValueError: there are no runs, or repeats do not pair with those of ``ar``.
    """
    if not runs:
        raise ValueError(f"{strategy}: no finished repeat to report")
    row: dict[str, Any] = {"strategy": strategy, "claims": str(claims), "repeats": len(runs)}
    summaries = [summarise(run.results, run.totals) for run in runs]
    row.update({name: _middle([s[name] for s in summaries]) for name in summaries[0]})
    for name in _RANGES:
        values = [s[name] for s in summaries if s[name] is not None]
        row[f"{name}_range"] = [min(values), max(values)] if values else None
    if parity is None:
        parity = lossless_against(
            [result for run in runs for result in run.results],
            [result for run in ar_runs or () for result in run.results],
            claims_tokens=str(claims) == "token",
        )
    row["lossless"] = parity.lossless
    row["num_compared"] = parity.num_compared
    row["num_differing"] = len({d.id for d in parity.differing})
    row["differing"] = [_divergence_json(d) for d in parity.differing]
    row["ties"] = [_divergence_json(d) for d in parity.ties]
    row.update(_speedups(runs, ar_runs))
    return row


def theoretical_speedup(
    totals: RunTotals, new_tokens: int, ar: RunTotals, ar_speed: float | None, ar_new_tokens: int
) -> float | None:
    """Speed-up that the run's own counts predict; one law for all clocks and executors.

    With t the seconds that ``ar`` takes per token on the run's clock, a way through the target
    costs t, whatever its number of rows, so a turn of an executor of latency L costs t / L:

        seconds = turns t / L + drafting,

    drafting being the seconds on that clock in which sources computed, with layers of the target
    too, less what passed while the target was busy, where the clock knows. The same turns count for
    ``ar`` itself, which shares them among the requests of a batch as the strategy does. What the
    run then loses against it is wider passes and overhead. None where ``ar`` has no speed.

    Args:
        totals, new_tokens: the strategy's run.
        ar, ar_speed, ar_new_tokens: plain decoding's totals, tokens/s of decoding, and tokens.
    """
    turns, ar_turns = _turns(totals), _turns(ar)
    if not ar_speed or not turns or not ar_turns or not new_tokens or not ar_new_tokens:
        return None
    drafting_s = totals.draft_total_s - (totals.draft_hidden_s or 0.0)
    seconds = turns / totals.latency / ar_speed + drafting_s
    return ar_turns / ar.latency / ar_speed / ar_new_tokens * new_tokens / seconds


def _turns(totals: RunTotals) -> int:
    """Turns of the loop that decoded: passes, or steps of a pipeline without those of prompts."""
    if totals.latency == 1:
        return totals.target_passes
    return totals.steps - totals.prefill_passes


def speed_ratio_interval(
    results: Sequence[RequestResult],
    ar_results: Sequence[RequestResult],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Bootstrap interval of the ratio of decode speeds, prompts resampled in pairs.

    Repeats of a prompt are pooled before. None with fewer than two common prompts or no times.

    Args:
        results, ar_results: the two sides; prompts that only one has are left out.
        level: coverage.
        num_resamples: bootstrap samples.
        seed: of the resampling.
    """
    mine, plain = _per_prompt(results), _per_prompt(ar_results)
    common = sorted(mine.keys() & plain.keys())
    if len(common) < 2:
        return None
    table = np.array([[*mine[i], *plain[i]] for i in common])  # [P, 4] tokens, seconds, twice
    if not (table.sum(0) > 0).all():
        return None
    picks = np.random.default_rng(seed).integers(0, len(common), (num_resamples, len(common)))
    sums = table[picks].sum(1)  # [num_resamples, 4]
    sums = sums[(sums > 0).all(1)]
    ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def prompt_speedups(runs: Sequence[Run], ar_runs: Sequence[Run]) -> npt.NDArray[np.float64]:
    """float64[P]: ratio of decode speeds per prompt, repeats pooled; the spread of a plot."""
    mine = _per_prompt([result for run in runs for result in run.results])
    plain = _per_prompt([result for run in ar_runs for result in run.results])
    common = [i for i in sorted(mine.keys() & plain.keys()) if min(*mine[i], *plain[i]) > 0]
    return np.array([(mine[i][0] / mine[i][1]) / (plain[i][0] / plain[i][1]) for i in common])


def _per_prompt(results: Sequence[RequestResult]) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    for result in results:
        phase = decode_phase(result)
        tokens, seconds = found.get(result.id, (0.0, 0.0))
        found[result.id] = (tokens + phase.tokens, seconds + phase.seconds)
    return found


def _speedups(runs: Sequence[Run], ar_runs: Sequence[Run] | None) -> dict[str, Any]:
    names = ("speedup_wall", "speedup_wall_range", "speedup_wall_interval", "speedup_theoretical")
    found: dict[str, Any] = dict.fromkeys(names)
    if not ar_runs:
        return found
    if len(ar_runs) != len(runs):
        raise ValueError(
            f"{len(runs)} repeats cannot be paired with {len(ar_runs)} repeats of ar; give every"
            " strategy the same number of repeats"
        )
    if any(run.totals.clock != ar.totals.clock for run, ar in zip(runs, ar_runs, strict=True)):
        return found  # times of two clocks have no ratio
    ratios, theories = [], []
    for run, ar in zip(runs, ar_runs, strict=True):
        speed, ar_speed = decode_speed(run.results), decode_speed(ar.results)
        if speed is not None and ar_speed:
            ratios.append(speed / ar_speed)
        tokens = sum(len(result.output) for result in run.results)
        ar_tokens = sum(len(result.output) for result in ar.results)
        theory = theoretical_speedup(run.totals, tokens, ar.totals, ar_speed, ar_tokens)
        if theory is not None:
            theories.append(theory)
    if ratios:
        found["speedup_wall"] = median(ratios)
        found["speedup_wall_range"] = [min(ratios), max(ratios)]
        interval = speed_ratio_interval(
            [result for run in runs for result in run.results],
            [result for run in ar_runs for result in run.results],
        )
        found["speedup_wall_interval"] = list(interval) if interval else None
    if theories:
        found["speedup_theoretical"] = median(theories)
    return found


def _middle(values: list[Any]) -> Any:
    """Median of numbers; key by key for histograms; the first repeat's value for the rest."""
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


def _divergence_json(found: Divergence) -> dict[str, Any]:
    return {
        "id": found.id,
        "position": found.position,
        "token": found.token,
        "ar_token": found.ar_token,
        "distance": found.distance,
    }
