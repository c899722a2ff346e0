"""Compares a strategy with ``ar`` (plain decoding): ratios of times, equality of tokens."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

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
) -> dict[str, Any]:
    """Returns a row of ``comparison.json``; ``runs`` and ``ar_runs`` have one run per repeat.

    It has every metric of ``summarise`` (medians over repeats), ``NAME_range`` of those in
    ``_RANGES``, and ratios to ``ar`` (docs/metrics.md). Tokens are compared with those of ``ar`` if
    ``claims``, the verifier's ``Lossless``, is "token". ValueError without runs, or if the numbers
    of repeats or the outputs of ``ar``'s repeats differ.
    """
    if not runs:
        raise ValueError(f"{strategy}: no finished repeat to report")
    row: dict[str, Any] = {"strategy": strategy, "claims": str(claims), "repeats": len(runs)}
    summaries = [summarise(run.results, run.totals) for run in runs]
    row |= {name: _middle([s[name] for s in summaries]) for name in summaries[0]}
    for name in _RANGES:
        row[f"{name}_range"] = _range([s[name] for s in summaries if s[name] is not None])
    ours, plain = ([r for run in each for r in run.results] for each in (runs, ar_runs or ()))
    row |= lossless_against(ours, plain, claims_tokens=str(claims) == "token")
    # These stay in the files, though only ``certify`` measures distances.
    row["differing"] = [token | {"distance": None} for token in row["differing"]]
    return row | {"ties": []} | _speedups(runs, ar_runs or ())


def _speedups(runs: Sequence[Run], ar_runs: Sequence[Run]) -> dict[str, Any]:
    if ar_runs and len(ar_runs) != len(runs):
        raise ValueError(
            f"{len(runs)} repeats cannot be paired with {len(ar_runs)} repeats of ar; give every"
            " strategy the same number of repeats"
        )
    pairs = list(zip(runs, ar_runs, strict=bool(ar_runs)))
    if any(run.totals.clock != ar.totals.clock for run, ar in pairs):
        pairs, ar_runs = [], ()  # times of different clocks have no ratio
    speeds = [(decode_speed(run.results), decode_speed(ar.results)) for run, ar in pairs]
    ratios = [speed / plain for speed, plain in speeds if speed is not None and plain]
    theories = [theoretical_speedup(run, ar) for run, ar in pairs]
    table = paired_phases(runs, ar_runs)
    prompts = _ratios(table).groupby("id").median()
    return {
        "speedup_wall": median(ratios) if ratios else None,
        "speedup_wall_range": _range(ratios),
        "speedup_wall_interval": _interval(table.groupby("id").sum(), _pooled_ratio),
        "speedup_theoretical": _middle(theories),
        "speedup_prompt_median": None if prompts.empty else float(prompts.median()),
        "speedup_prompt_median_interval": _interval(prompts.to_frame(), np.median),
    }


def _range(values: list[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None


def theoretical_speedup(run: Run, ar: Run) -> float | None:
    """Predicts the speed-up over ``ar`` from the run's own counts; None without a latency or speed.

    It assumes that a target pass takes as long as in ``ar``: a run takes its number of passes
    (for a pipeline: decode steps / latency) times that time, plus the drafting not hidden by it.
    """
    speed, ways = decode_speed(ar.results), list[float]()  # ways through the target, per token
    for each in (ar, run):
        totals, tokens = each.totals, sum(len(result.output) for result in each.results)
        # The loop's decoding turns: target passes, or pipeline steps other than prefill.
        one = totals.latency == 1
        turns = totals.target_passes if one else totals.steps - totals.prefill_passes
        if not (totals.latency and turns and tokens):
            return None
        ways.append(turns / totals.latency / tokens)
    drafting_s = (totals.draft_total_s - (totals.draft_hidden_s or 0.0)) / tokens  # of ``run``
    return ways[0] / speed / (ways[1] / speed + drafting_s) if speed else None


def first_difference(tokens: Sequence[int], ar_tokens: Sequence[int]) -> int | None:
    """Returns the index of the first difference; None if equal. A missing token is a difference."""
    pairs = zip_longest(tokens, ar_tokens)
    return next((i for i, (token, ar_token) in enumerate(pairs) if token != ar_token), None)


def lossless_against(
    rows: Sequence[RequestResult], ar_rows: Sequence[RequestResult], *, claims_tokens: bool = True
) -> dict[str, Any]:
    """Compares a strategy's outputs with those of ``ar``; ValueError if repeats of ``ar`` differ.

    Prompts that only one side has and outputs that end early count as different. Every repeat is
    compared with the first ``ar`` result. Ties are not tolerated (``certify.numerics`` does so).

    Returns ``lossless``, None if nothing was compared; ``num_compared`` outputs, ``num_differing``
    prompts, and ``differing``: the first difference of each output, at position -1 if an output is
    missing; a token is None after the end of the shorter output.
    """
    expected: dict[int, tuple[int, ...]] = {}
    for row in ar_rows if claims_tokens else ():
        if expected.setdefault(row.id, row.output) != row.output:
            raise ValueError(
                f"the ar results of prompt {row.id} differ from each other: the reference is not"
                " deterministic, so nothing can be compared with it"
            )
    unpaired = expected.keys() ^ {row.id for row in rows} if expected else ()
    compared = [(row.id, row.output, expected[row.id]) for row in rows if row.id in expected]
    differing: list[tuple[Any, ...]] = [(i, -1, None, None) for i in unpaired]
    for i, *outputs in compared:
        if (at := first_difference(*outputs)) is not None:
            differing.append((i, at, *([*own, None][min(at, len(own))] for own in outputs)))
    names = ("id", "position", "token", "ar_token")
    first = sorted(dict.fromkeys(differing), key=lambda d: d[0])
    return {
        "lossless": not first if expected else None,
        "num_compared": len(compared),
        "num_differing": len({d[0] for d in first}),
        "differing": [dict(zip(names, d, strict=True)) for d in first],
    }


def paired_phases(runs: Sequence[Run], ar_runs: Sequence[Run]) -> pd.DataFrame:
    """Joins ``decode_phases`` of prompts in both runs; ``ar``'s columns have the prefix ``ar_``."""
    return decode_phases(runs).join(decode_phases(ar_runs).add_prefix("ar_"), how="inner")


def decode_phases(runs: Sequence[Run]) -> pd.DataFrame:
    phases = [(at, r.id, decode_phase(r)) for at, run in enumerate(runs) for r in run.results]
    rows = [(repeat, prompt, phase.tokens, phase.seconds) for repeat, prompt, phase in phases]
    table = pd.DataFrame(rows, columns=["repeat", "id", "tokens", "seconds"])
    return table.set_index(["repeat", "id"]).astype(float)


def prompt_speedups(runs: Sequence[Run], ar_runs: Sequence[Run]) -> npt.NDArray[np.float64]:
    return _ratios(paired_phases(runs, ar_runs).groupby("id").sum()).to_numpy()


def speed_ratio_interval(
    results: Sequence[RequestResult], ar_results: Sequence[RequestResult]
) -> list[float] | None:
    """Returns the 95 % bootstrap interval, over prompts, of the ratio of decode speeds to ``ar``;
    the repeats of a prompt are pooled. None for fewer than two prompts or without times.
    """
    ours, plain = (
        decode_phases([Run(tuple(of), RunTotals())]).groupby("id").sum()
        for of in (results, ar_results)
    )
    return _interval(ours.join(plain.add_prefix("ar_"), how="inner"), _pooled_ratio)


def _ratios(table: pd.DataFrame) -> pd.Series:
    """Returns the ratio of speeds of each row in which both sides have tokens and times."""
    used = table[(table > 0).all(axis=1)]
    return used["tokens"] / used["seconds"] / (used["ar_tokens"] / used["ar_seconds"])


def _pooled_ratio(*columns: npt.NDArray[np.float64], axis: int = -1) -> Any:
    tokens, seconds, ar_tokens, ar_seconds = (column.sum(axis=axis) for column in columns)
    with np.errstate(divide="ignore", invalid="ignore"):
        return tokens / seconds / (ar_tokens / ar_seconds)


def _interval(table: pd.DataFrame, statistic: Callable[..., Any]) -> list[float] | None:
    """Bootstraps a 95 % interval of ``statistic`` (of the columns) over rows; None if undefined."""
    from scipy.stats import bootstrap  # takes most of a second to import

    if len(table) < 2 or not (table.sum() > 0).all():
        return None
    interval = bootstrap(
        [table[name].to_numpy(float) for name in table],
        statistic,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=2000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [float(end) for end in interval] if np.isfinite([*interval]).all() else None


def _middle(values: list[Any]) -> Any:
    """Takes medians of numbers, per key in histograms; other values come from the first repeat."""
    first = values[0] if values else None
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values if value for key in value)
        return {k: _middle([v[k] for v in values if v and k in v]) for k in keys}
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if all(isinstance(v, int) for v in numbers) and len(set(numbers)) <= 1:
        return first
    return median(numbers)
