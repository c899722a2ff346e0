"""The papers' estimates of the time between tokens, for comparison with the simulator.

Letters: N stages, w tree width, p probability that the last stage's token is in the tree, T time of
a step. Both of SpecPipe's equations are reconstructed, because the available text has no formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.clocks import LatencyProfile, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one pipeline step at a tree width, in milliseconds.

    Attributes:
        stages: compute, pruning and transfer of each stage; the last includes the output head.
        compute, compute_one: computation of the longest stage, for a tree level and for one token.
        transfer, draft: transfer of one tree level, and a draft pass over one.
    """

    stages: tuple[float, ...]
    compute: float
    compute_one: float
    transfer: float
    draft: float

    @staticmethod
    def of(profile: LatencyProfile, *, width: int, stages: int, group: int = 1) -> StepTimes:
        """Reads the times from a profile of one device.

        ``width`` is in tokens per tree level. ``group`` is the number of devices per stage, which
        work in sequence within a step (PipeDec's G).
        """
        one, all_tokens = profile.ms(Work.STAGE, 1), profile.ms(Work.STAGE, width)
        transfer = profile.ms(Work.TRANSFER, width)
        compute = group * all_tokens + (group - 1) * transfer
        plain = compute + profile.ms(Work.PRUNE, width) + transfer
        return StepTimes(
            stages=(*[plain] * (stages - 1), plain + profile.ms(Work.HEAD, width)),
            compute=compute,
            compute_one=group * one + (group - 1) * profile.ms(Work.TRANSFER, 1),
            transfer=transfer,
            draft=profile.ms(Work.DRAFT, width),
        )


def eq1_tbt(stages: Sequence[float], hit: float) -> float:
    """SpecPipe Eq. 1 (reconstructed): max_i T_i + (1 - p) times the sum over the other stages.

    ``stages`` are the T_i, and ``hit`` is p. The result has the unit of ``stages``.
    """
    longest = max(stages)
    return longest + (1.0 - hit) * (sum(stages) - longest)


def eq2_tbt(step: float, num_stages: int, hit: float) -> float:
    """SpecPipe Eq. 2 (reconstructed), for equal stages: T (1 + (1 - p) (N - 1))."""
    return step * (1.0 + (1.0 - hit) * (num_stages - 1))


def plain_latency(times: StepTimes) -> float:
    """PipeDec 2.4, plain decoding: N computations, N - 1 transfers; ``times`` are of width 1."""
    num = len(times.stages)
    return num * times.compute + (num - 1) * times.transfer


def pipedec_latency(times: StepTimes) -> float:
    """PipeDec 2.4: max(T_draft, C max T_c + max T_t) with C = T_c(w) / T_c(1).

    It assumes that every token is a hit.
    """
    factor = times.compute / times.compute_one if times.compute_one else 1.0
    return max(times.draft, factor * times.compute_one + times.transfer)
