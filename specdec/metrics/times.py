"""Times per token and per request, from emission times on the run's clock."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.metrics.results import RequestResult
from specdec.types import FloatArray


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """A request's tokens after its first emission, and the time that they took from then on."""

    tokens: int  # emitted later than the first
    seconds: float  # from the first emission to the last
    gaps_s: FloatArray  # [tokens], since the previous token; 0 if emitted together


def decode_phase(result: RequestResult) -> DecodePhase:
    times = np.asarray(result.emitted_s, np.float64)
    if not len(times):
        return DecodePhase(0, 0.0, times)
    together = int(np.searchsorted(times, times[0], side="right"))
    gaps = np.diff(times[together - 1 :])
    return DecodePhase(len(gaps), float(times[-1] - times[0]), gaps)


def all_gaps(results: Sequence[RequestResult]) -> FloatArray:
    """Returns float64[N], seconds between tokens of all decode phases, in the order of requests."""
    return np.concatenate([np.zeros(0), *(decode_phase(result).gaps_s for result in results)])


def decode_speed(results: Sequence[RequestResult]) -> float | None:
    phases = [decode_phase(result) for result in results]
    seconds = sum(phase.seconds for phase in phases)
    return sum(phase.tokens for phase in phases) / seconds if seconds > 0 else None


def time_metrics(results: Sequence[RequestResult], *, clock_s: float) -> dict[str, float | None]:
    """Returns times and speeds by name, None where undefined. ``tokens_per_s`` equals
    1000 / ``tbt_ms_mean``: tokens of one emission have a gap of 0.
    """
    gaps, new_tokens = all_gaps(results), sum(len(result.output) for result in results)
    means = [phase.gaps_s.mean() for phase in map(decode_phase, results) if phase.tokens]
    return {
        "tokens_per_s": decode_speed(results),
        "ttft_ms": _ms([r.emitted_s[0] - r.admitted_s for r in results if r.emitted_s]),
        "queue_ms": _ms([r.admitted_s - r.arrival_s for r in results]),
        "tbt_ms_mean": _ms(gaps),
        "throughput_tokens_per_s": new_tokens / clock_s if clock_s > 0 else None,
        **{f"tbt_ms_p{percent}": _ms(gaps, percent) for percent in (50, 95, 99)},
        "tbt_ms_request_p99": _ms(means, 99),
    }


def _ms(seconds: Sequence[float] | FloatArray, percentile: int | None = None) -> float | None:
    """Returns the mean or a percentile in milliseconds; None for an empty sequence."""
    if not len(seconds):
        return None
    value = np.mean(seconds) if percentile is None else np.percentile(seconds, percentile)
    return float(value) * 1e3
