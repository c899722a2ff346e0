"""The time between tokens implied by a pipelined run's counts and a latency profile.

Symbols of SpecPipe 3.3.3: N stages, p hit probability, T(w) time of a stage for w tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.clocks import LatencyProfile, Work
from specdec.metrics import RequestResult, RunTotals
from specdec.metrics.times import decode_phase


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCounts:
    """Counts of the decode phase: everything after each request's first answer.

    Attributes:
        steps: these answers, and the steps without an answer in flushes and partial refills.
        rows: mean tree nodes per target pass.
        beside: draft passes beside each step.
        between: total draft passes for which the target waits.
    """

    tokens: int
    answers: int
    steps: int
    rows: float
    beside: int = 0
    between: float = 0.0


def decode_counts(
    results: Sequence[RequestResult],
    totals: RunTotals,
    *,
    beside: int = 0,
    between_hit: float = 0.0,
    between_miss: float = 0.0,
) -> DecodeCounts:
    """The counts of a run that decodes one request at a time.

    Args:
        beside: draft passes beside each step.
        between_hit, between_miss: draft passes for which the target waits after a hit and after a
            miss.
    """
    counters = [result.counters for result in results]
    hits, misses = sum(c.hits for c in counters), sum(c.misses for c in counters)
    answers = hits + misses - len(results)
    waited = hits * between_hit + misses * between_miss
    return DecodeCounts(
        tokens=sum(decode_phase(result).tokens for result in results),
        answers=answers,
        steps=answers + sum(c.flush_steps + c.refill_steps for c in counters),
        rows=totals.target_rows / totals.target_passes,
        beside=beside,
        between=waited * answers / (hits + misses),
    )


def implied_tbt_ms(counts: DecodeCounts, profile: LatencyProfile) -> float:
    """Milliseconds per token of the decode phase.

        (steps (max(T(rows), beside T_draft) + T_transfer) + answers T_prune + between T_draft)
            / tokens

    A step lasts as long as its busiest rank: the first stage, which has a level before any pruning,
    or the draft. T is evaluated at the mean number of rows; it is linear up to a block of tokens,
    so this is the mean of T unless passes are larger. Every answer is followed by pruning, except
    with a single node in flight.
    """
    draft = profile.ms(Work.DRAFT, 1)
    rows = counts.rows
    compute = max(profile.ms(Work.STAGE, rows), counts.beside * draft)  # type: ignore[arg-type]
    step = compute + profile.ms(Work.TRANSFER, rows)  # type: ignore[arg-type]
    prune = profile.ms(Work.PRUNE, 1) if rows > 1 else 0.0
    total = counts.steps * step + counts.answers * prune + counts.between * draft
    return total / counts.tokens


def needed_acceptance_length(tbt_ms: float, rows: float, stages: int, p: LatencyProfile) -> float:
    """Tokens per tree above which a whole-tree method with hidden drafting beats ``tbt_ms``.

    A tree takes N steps: (N (T(rows) + T_transfer) + T_prune) / tbt_ms.
    """
    step = p.ms(Work.STAGE, rows) + p.ms(Work.TRANSFER, rows)  # type: ignore[arg-type]
    return (stages * step + p.ms(Work.PRUNE, 1)) / tbt_ms
