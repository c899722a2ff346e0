"""Bootstrap intervals over prompts for figures computed from sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specdec.metrics import RequestResult
from specdec.metrics.times import decode_phase
from specdec.types import FloatArray

Interval = tuple[float | None, float | None]


def interval(
    rows: Iterable[Sequence[float]],
    value: Callable[[FloatArray], FloatArray],
    *,
    num_resamples: int = 2000,
) -> Interval:
    """The 95 % interval of a figure, prompts resampled; (None, None) below two prompts.

    Args:
        rows: counts of each prompt, float[P, K].
        value: computes the figure from the sums, float64[K, num_resamples].
    """
    table = np.asarray(list(rows), float)
    if len(table) < 2:
        return None, None
    picks = np.random.default_rng(0).integers(0, len(table), (num_resamples, len(table)))
    with np.errstate(divide="ignore", invalid="ignore"):
        figures = value(table[picks].sum(1).T)
    figures = figures[np.isfinite(figures)]
    if not len(figures):
        return None, None
    low, high = np.quantile(figures, [0.025, 0.975])
    return float(low), float(high)


def share(sums: FloatArray) -> FloatArray:
    """The ratio of the first to the second sum."""
    return np.asarray(sums[0] / sums[1])


def hits_of(results: Sequence[RequestResult]) -> list[tuple[float, float]]:
    """(hits, answers) of each prompt, for the hit rate."""
    return [(r.counters.hits, r.counters.answers) for r in results]


def lengths_of(results: Sequence[RequestResult]) -> list[tuple[float, float]]:
    """(emitted tokens, answers) of each prompt, for the acceptance length."""
    return [(len(r.output), r.counters.answers) for r in results]


def accepted_of(results: Sequence[RequestResult]) -> list[tuple[float, float]]:
    """(accepted tokens that were emitted, answers) of each prompt, for ``accepted_per_pass``."""
    counters = [r.counters for r in results]
    return [(c.accepted - max(0, c.cut_tokens - 1), c.answers) for c in counters]


def beside(
    left: Sequence[RequestResult],
    right: Sequence[RequestResult],
    counts: Callable[[Sequence[RequestResult]], list[tuple[float, float]]],
) -> list[tuple[float, ...]]:
    """Counts of the common prompts of two runs, in one row each: float[P, 4]."""
    by = [dict(zip([r.id for r in side], counts(side), strict=True)) for side in (left, right)]
    return [(*by[0][i], *by[1][i]) for i in sorted(by[0].keys() & by[1].keys())]


def times_of(results: Sequence[RequestResult]) -> list[tuple[float, float]]:
    """(seconds, tokens) of each prompt's decode phase, for the time between tokens."""
    phases = [decode_phase(result) for result in results]
    return [(phase.seconds, phase.tokens) for phase in phases]
