"""Lets strategies decode the same prompts in turns of a fraction of a second.

The speed of a machine changes within seconds (clock frequency, other tenants of its memory). Runs
of half a second, one after the other, then differ by more than the strategies do. In short turns
such a change affects all strategies alike.
"""

from collections import deque
from collections.abc import Sequence
from math import inf
from time import perf_counter

import torch

from specdec.clocks.wall import MeasuredClock
from specdec.metrics import RequestResult, RunTotals
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.sources import Background

TURN_S = 0.1
"""Seconds of a turn: long enough for some passes of a small model, so that few find cold caches."""


def run_interleaved(
    runners: Sequence[PartsRunner], prompts: Sequence[TokenPrompt]
) -> list[tuple[list[RequestResult], RunTotals]]:
    """Decodes the prompts with every runner, whose measured clock stands still in others' turns.

    A strategy whose draft model works in a thread, which would continue in the others' turns, is
    not interrupted. Returns per runner the requests, in the order of finishing, and the totals.
    """
    results: list[list[RequestResult]] = [[] for _ in runners]
    totals: dict[int, RunTotals] = {}
    pairs = zip(runners, results, strict=True)
    steps = [runner.in_steps(prompts, found.append) for runner, found in pairs]
    paused: dict[int, float] = {}
    waiting = deque(range(len(runners)))
    while waiting:
        at = waiting.popleft()
        clock, began = runners[at].parts.clock, perf_counter()
        assert isinstance(clock, MeasuredClock), "turns need a measured clock"
        clock.skip(began - paused.get(at, began))
        turn_s = inf if isinstance(runners[at].parts.source, Background) else TURN_S
        try:
            with torch.inference_mode():
                next(steps[at])
                while perf_counter() - began < turn_s:
                    next(steps[at])
            waiting.append(at)
        except StopIteration as end:
            totals[at] = end.value
        paused[at] = perf_counter()
    return [(found, totals[at]) for at, found in enumerate(results)]
