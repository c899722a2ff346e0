"""A free-running draft: passes may outlive a step; target and draft do not wait for each other.

AMUSD is such a draft beside a target on one stage or several; DSI feeds copies of the target while
others work. Both with a target that is faster than its draft, and slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdec.certify.subject import decode_cases
from specdec.clocks import Clock, ClockKind, MeasuredClock
from specdec.compose.planned import Planned, planned
from specdec.compose.workbench import Parts, Workbench
from specdec.executors import PipelineExecutor
from specdec.pairs import RandomPair
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.sources.background import Background
from specdec.state import RequestState, StopRules
from specdec.types import EventKind
from specdec.verifiers import MatchVerifier
from tests import toys
from tests.toys import FreeRunning, Replicas

pytestmark = pytest.mark.slow

TIMES = {
    "slow target": lambda: toys.simulated(10.0, 3.0),
    "fast target": lambda: toys.simulated(3.0, 10.0),
    "measured": MeasuredClock,
}
"""Milliseconds of a stage and of a draft pass."""

EXECUTORS: dict[str, Callable[[RandomPair], Planned]] = {
    "one stage": lambda pair: planned(PipelineExecutor, pair, stages=1),
    "three stages": lambda pair: planned(PipelineExecutor, pair, stages=3),
    "two replicas": lambda pair: planned(Replicas, pair, replicas=2, delay_ms=4.0),
}


def composed(
    models: RandomPair, executor: Planned, clock: Clock, **keys: Any
) -> tuple[Parts, FreeRunning]:
    """A free draft on a device of its own, beside an executor; copies are fed at once."""
    bench = Workbench(models, seed=toys.SEED, clock=clock)
    at_once = executor.plan.latency is None
    policy = FreeRunning(
        feed_at_once=at_once, outstanding=executor.plan.in_flight if at_once else None, **keys
    )
    source = Background(
        source=DraftModelSource(runner=bench.draft_runner()),
        free_rank=executor.plan.num_ranks + 1,
    )
    parts = bench.parts(source=source, policy=policy, verifier=MatchVerifier(), executor=executor)
    return parts, policy


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("times", TIMES)
def test_the_output_is_that_of_plain_decoding(times: str, executor: str, batch_size: int) -> None:
    models = toys.pair()
    wanted = toys.cases(12)[:: 2 if batch_size == 1 else 1]  # every sampling
    plan = EXECUTORS[executor](models)
    parts, policy = composed(models, plan, TIMES[times]())
    toys.assert_plain(decode_cases(parts, wanted, batch_size=batch_size), wanted)
    assert policy.log.count(EventKind.DRAFT) > 8
    assert not policy.misplaced, "candidates of pruned nodes were stored"
    if parts.clock.kind is ClockKind.SIMULATED:
        assert policy.outlived > 10, "no pass went on over the end of a step"
        assert policy.dropped > 0, "no pass ended whose nodes had been pruned"
        busy = parts.clock.busy_s  # type: ignore[attr-defined]
        of_draft = busy.pop(plan.plan.num_ranks + 1)
        assert parts.clock.now() < 0.95 * (of_draft + max(busy.values())), "they took turns"


# Times by hand.


def emitted_ms(
    target_ms: float, draft_ms: float, make: Callable[[RandomPair], Planned], **keys: Any
) -> np.ndarray:
    """Time of each of 80 tokens of one greedy request with a perfect draft."""
    models = toys.pair(4)
    parts, _ = composed(models, make(models), toys.simulated(target_ms, draft_ms), **keys)
    request = RequestState(
        request_id=1,
        prompt=np.array([5]),
        stop=StopRules(max_new_tokens=80),
        sampling=SamplingParams(),
    )
    for _ in parts.decode(parts.new_state(), [request]):
        pass
    assert request.output == list(_greedy())
    return np.array(request.emitted_s) * 1e3


def _greedy() -> tuple[int, ...]:
    return (
        toys.oracle()
        .decode(
            prompt_id=1, prompt=(5,), sampling=SamplingParams(), stop=StopRules(max_new_tokens=80)
        )
        .output
    )


def replicas(num: int) -> Callable[[RandomPair], Planned]:
    return lambda pair: planned(Replicas, pair, replicas=num)


def pipeline(num: int) -> Callable[[RandomPair], Planned]:
    return lambda pair: planned(PipelineExecutor, pair, stages=num)


@pytest.mark.parametrize(
    ("target_ms", "draft_ms", "make"),
    [
        (10.0, 2.0, pipeline(1)),
        (10.0, 3.0, pipeline(1)),
        (10.0, 5.0, pipeline(3)),
        (10.0, 20.0, pipeline(3)),  # slower than a step, faster than an answer of 30 ms
        (10.0, 2.0, replicas(2)),
        (10.0, 2.0, replicas(6)),
    ],
)
def test_a_perfect_draft_that_is_faster_sets_the_pace(
    target_ms: float, draft_ms: float, make: Callable[[RandomPair], Planned]
) -> None:
    """The draft never stops: an answer's token is a node by the time it arrives, so all are hits.

    Every draft pass therefore becomes one emitted token, whatever the target takes: the time per
    token is that of a draft pass. Tokens 20 and 60 are whole periods apart for all of these times.
    """
    times = emitted_ms(target_ms, draft_ms, make)
    assert (times[60] - times[20]) / 40 == pytest.approx(draft_ms, rel=0.01)


@pytest.mark.parametrize(
    ("target_ms", "draft_ms", "make", "pace_ms"),
    [
        (3.0, 10.0, pipeline(1), 3.0),
        (10.0, 40.0, pipeline(3), 30.0),
        (3.0, 10.0, replicas(2), 3.0),
    ],
)
def test_a_draft_that_is_slower_costs_nothing(
    target_ms: float, draft_ms: float, make: Callable[[RandomPair], Planned], pace_ms: float
) -> None:
    """Every answer is there before the draft's token, which is dropped: plain decoding's pace.

    80 tokens take 80 passes of the target, from the first on: the prompt is one token.
    """
    times = emitted_ms(target_ms, draft_ms, make)
    np.testing.assert_allclose(times, pace_ms * np.arange(1, 81), rtol=1e-9)


def test_enough_copies_of_the_target_hide_it() -> None:
    """DSI: with a copy for each draft pass of a target pass, token i comes at (i - 1) d + t."""
    times = emitted_ms(10.0, 2.0, replicas(5 + 1))
    np.testing.assert_allclose(times, 10.0 + 2.0 * np.arange(80), rtol=1e-9)
