"""Times per token and per request, from emission times on the run's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdec.metrics.results import RequestResult

_Seconds = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """A request after its first emission.

    Tokens emitted together with the first one belong to the prefill; the decode phase starts at
    that time with the next token.
    """

    tokens: int  # emitted later than the first
    seconds: float  # from the first emission to the last
    gaps_s: npt.NDArray[np.float64]  # [tokens], since the previous token; 0 if emitted together


def decode_phase(result: RequestResult) -> DecodePhase:
    """Returns a request's decode phase, which is empty if all tokens were emitted together."""
    times = np.asarray(result.emitted_s, np.float64)
    if not len(times):
        return DecodePhase(0, 0.0, times)
    together = int(np.searchsorted(times, times[0], side="right"))
    gaps = np.diff(times[together - 1 :])
    return DecodePhase(len(gaps), float(times[-1] - times[0]), gaps)


def decode_speed(results: Sequence[RequestResult]) -> float | None:
    """Returns tokens per second over all decode phases; None if they take no time."""
    phases = [decode_phase(result) for result in results]
    seconds = sum(phase.seconds for phase in phases)
    return sum(phase.tokens for phase in phases) / seconds if seconds > 0 else None


def time_metrics(results: Sequence[RequestResult], *, clock_s: float) -> dict[str, float | None]:
    """Returns latencies and speeds by name (docs/metrics.md); undefined ones are None.

    ``tokens_per_s`` equals 1000 / ``tbt_ms_mean``: both cover the decode phases, where tokens of
    one emission have a gap of 0.

    Args:
        clock_s: duration of the run on its clock.
    """
    gaps = [decode_phase(result).gaps_s for result in results]
    all_gaps = np.concatenate([np.zeros(0), *gaps])
    new_tokens = sum(len(result.output) for result in results)
    started = [result for result in results if result.emitted_s]
    metrics: dict[str, float | None] = {
        "tokens_per_s": decode_speed(results),
        "ttft_ms": _mean_ms([r.emitted_s[0] - r.admitted_s for r in started]),
        "queue_ms": _mean_ms([r.admitted_s - r.arrival_s for r in results]),
        "tbt_ms_mean": _mean_ms(all_gaps),
        "throughput_tokens_per_s": new_tokens / clock_s if clock_s > 0 else None,
    }
    for percent in (50, 95, 99):
        metrics[f"tbt_ms_p{percent}"] = _percentile_ms(all_gaps, percent)
    means = [float(gaps_s.mean()) for gaps_s in gaps if len(gaps_s)]
    metrics["tbt_ms_request_p99"] = _percentile_ms(means, 99)
    return metrics


def _mean_ms(seconds: _Seconds) -> float | None:
    return float(np.mean(seconds)) * 1e3 if len(seconds) else None


def _percentile_ms(seconds: _Seconds, percent: int) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if len(seconds) else None
