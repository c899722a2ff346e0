"""Strategies that decode the same prompts in turns of a fraction of a second.

The speed of a machine changes within seconds (clock frequency, other tenants of its memory). Runs
of half a second, one after the other, then differ by more than the strategies do; in short turns
such a change is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from math import inf
from time import perf_counter

from specdec.clocks.wall import MeasuredClock
from specdec.metrics import RequestResult, RunTotals
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.sources import Background

TURN_S = 0.1
"""Seconds of a turn: some passes of a small model, so that few of them find cold caches."""


def run_interleaved(
    runners: Sequence[PartsRunner], prompts: Sequence[TokenPrompt]
) -> list[tuple[list[RequestResult], RunTotals]]:
    """Decodes the prompts with every runner; a runner's clock stands still in the others' turns.

    A draft in a thread would go on meanwhile, so strategies that have one decode in one turn.

    Args:
        runners: with measured clocks of this process.
        prompts: served together by each runner.

    Returns:
        Per runner the finished requests, in the order of finishing, and the totals.
    """
    results: list[list[RequestResult]] = [[] for _ in runners]
    totals: list[RunTotals | None] = [None] * len(runners)
    steps = [
        runner.in_steps(prompts, found.append)
        for runner, found in zip(runners, results, strict=True)
    ]
    paused = [0.0] * len(runners)
    for at in cycle(range(len(runners))):
        if all(total is not None for total in totals):
            break
        if totals[at] is not None:
            continue
        clock, began = runners[at].parts.clock, perf_counter()
        assert isinstance(clock, MeasuredClock), "turns need a measured clock"
        if paused[at]:
            clock.skip(began - paused[at])
        turn_s = inf if isinstance(runners[at].parts.source, Background) else TURN_S
        try:
            next(steps[at])
            while perf_counter() - began < turn_s:
                next(steps[at])
        except StopIteration as end:
            totals[at] = end.value
        paused[at] = perf_counter()
    return list(zip(results, [total for total in totals if total is not None], strict=True))
