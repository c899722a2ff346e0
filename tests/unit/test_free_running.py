"""A free-running draft: passes may outlive a step; target and draft do not wait for each other.

AMUSD is such a draft beside a target on one stage or several; DSI feeds copies of the target while
others work. Both with a target that is faster than its draft, and slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.certify.subject import decode_cases
from specdec.clocks import Clock, ClockKind, MeasuredClock
from specdec.compose.planned import Planned, planned
from specdec.compose.workbench import Parts, Workbench
from specdec.executors import PipelineExecutor
from specdec.interfaces import TokenSource
from specdec.pairs import RandomPair
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.sources.background import Background
from specdec.state import RequestState, StopRules
from specdec.types import Candidates, EventKind, Nodes, Output
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


# ---------------------------------------------------------------------- times by hand


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


# ---------------------------------------------------------------------- passes in a thread


class Gated(TokenSource):
    """A source whose passes wait for a signal, and which logs what reaches it.

    Attributes:
        log: calls, in order.
        gate: lets one pass end.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = threading.Semaphore(0)

    def open(self, request: Any) -> None:
        self.log.append(f"open {request.id}")

    def expand(self, state: Any, nodes: Nodes, k: int) -> Candidates:
        self.log.append(f"begin {nodes.items[0][0]}")
        assert self.gate.acquire(timeout=30)
        self.log.append(f"end {nodes.items[0][0]}")
        return Candidates.empty(len(nodes))

    def commit(self, commits: Any, output: Any) -> None:
        self.log.append("commit")

    def close(self, request_id: int) -> None:
        self.log.append(f"close {request_id}")


def gated() -> tuple[Background, Gated, Any]:
    """A source in the background with requests 1 and 2, and a state of a measured clock."""
    inner = Gated()
    source: Any = Background(source=inner, free_rank=1)  # type: ignore[arg-type]
    bench = Workbench(toys.pair(), clock=MeasuredClock())
    parts = SimpleNamespace(draws=bench.draws, clock=bench.clock, meter=bench.meter)
    state = toys.DecodeState(**vars(parts))
    for number in (1, 2):
        state.requests[number] = RequestState(
            request_id=number,
            prompt=np.array([1]),
            stop=StopRules(max_new_tokens=4),
            sampling=SamplingParams(),
        )
    return source, inner, state


def finished(source: Any, ticket: Any) -> Candidates:
    """The candidates of a pass that is let through."""
    while (candidates := source.poll(ticket)) is None:
        threading.Event().wait(0.001)
    return candidates  # type: ignore[no-any-return]


def test_calls_wait_for_the_running_pass_and_precede_the_next() -> None:
    """The second pass is queued while the first one runs: what came between must come before it."""
    source, inner, state = gated()
    root = np.array([0])
    source.open(state.requests[1])
    first = source.start(state, Nodes(((1, root),)), 1)
    source.commit((), Output(step=0))
    source.open(state.requests[2])
    second = source.start(state, Nodes(((2, root),)), 1)
    source.commit((), Output(step=1))
    source.close(1)
    assert source.poll(first) is None
    assert source.poll(second) is None
    inner.gate.release()
    finished(source, first)
    assert source.poll(second) is None, "the second pass has not been let through"
    inner.gate.release()
    finished(source, second)
    assert inner.log == [
        "open 1",
        "begin 1",
        "end 1",
        "commit",
        "open 2",
        "begin 2",
        "end 2",
        "commit",
        "close 1",
    ]


def test_a_pass_reads_the_trees_as_they_were_when_it_began() -> None:
    source, inner, state = gated()
    seen: list[int] = []
    inner.expand = lambda view, nodes, k: (  # type: ignore[method-assign]
        inner.gate.acquire(timeout=30),
        seen.append(len(view.requests[1].tree)),
        Candidates.empty(1),
    )[2]
    ticket = source.start(state, Nodes(((1, np.array([0])),)), 1)
    zero = np.array([0])
    state.requests[1].tree.append(zero, np.array([7]), np.array([-1.0]))
    inner.gate.release()
    finished(source, ticket)
    assert seen == [1]
    assert len(state.requests[1].tree) == 2


def test_a_pass_that_fails_is_reported_where_it_is_polled() -> None:
    source, inner, state = gated()

    def failing(view: Any, nodes: Nodes, k: int) -> Candidates:
        raise RuntimeError("planted")

    inner.expand = failing  # type: ignore[method-assign]
    ticket = source.start(state, Nodes(((1, np.array([0])),)), 1)
    with pytest.raises(RuntimeError, match="planted"):
        finished(source, ticket)


def test_the_wakeup_comes_when_the_pass_can_be_polled() -> None:
    """A signal before that would be lost: the loop would look again only after its timeout."""
    source, inner, state = gated()
    found: list[bool] = []
    woken = threading.Event()

    class Wakeup(threading.Event):
        def set(self) -> None:
            found.append(source.poll(ticket) is not None)
            woken.set()

    ticket = source.start(state, Nodes(((1, np.array([0])),)), 1)
    source.set_wakeup(Wakeup())
    inner.gate.release()
    assert woken.wait(30)
    assert found == [True]
