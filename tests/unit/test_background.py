"""Draft passes that run beside the loop, and what happens while the target works, in order.

Passes of the fake source take 3 ms; the fake target is due when the tests say so.
"""

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch

from specdec.clocks import (
    CONTROLLER,
    Clock,
    MeasuredClock,
    PacedClock,
    SimulatedClock,
    Work,
)
from specdec.interfaces import Executor, TokenSource
from specdec.sources.background import Background
from specdec.sources.events import LoopEvents
from specdec.state import DecodeState, RequestState
from specdec.types import (
    Candidates,
    Commit,
    EarlyHidden,
    Event,
    EventKind,
    Exits,
    HiddenName,
    Nodes,
    Output,
)
from tests import toys
from tests.states import new_commit, new_request, new_state

PASS_S = 0.003
DRAFT_RANK = 5
PROFILE = toys.priced(draft=1000 * PASS_S)
NAME = HiddenName(2)
TIMEOUT_S = 30.0


class Source(TokenSource):
    """Proposes the tokens 10, 11, ... for every node, and records its calls in ``log``."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.outputs: list[Output] = []
        self.threads: set[int] = set()

    def open(self, request: RequestState) -> None:
        self.log.append(f"open {request.id}")

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        self.threads.add(threading.get_ident())
        state.clock.start(CONTROLLER)
        state.clock.charge(CONTROLLER, Work.DRAFT, len(nodes))
        self.log.append(tuple((i, *ids.tolist()) for i, ids in nodes.items))
        shape = (len(nodes), k)
        tokens = np.broadcast_to(np.arange(10, 10 + k), shape).copy()
        counts = np.full(len(nodes), k)
        return Candidates(tokens=tokens, logprobs=np.full(shape, -1.0), counts=counts)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self.log.append(f"commit {[c.request for c in commits]}")
        self.outputs.append(output)

    def close(self, request_id: int) -> None:
        self.log.append(f"close {request_id}")


class Held(Source):
    """A source whose passes wait until they are let go, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.contexts: list[list[int]] = []

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        self.began.release()
        assert self.go.acquire(timeout=TIMEOUT_S)
        request = state.requests[nodes.items[0][0]]
        self.contexts.append(request.path_tokens(len(request.tree) - 1).tolist())
        return super().expand(state, nodes, k)


class Target(Executor):
    """The executor's part in events: ready at ``at``, with outputs that arrive before."""

    can_poll = True
    submit = collect = lambda *given, **keys: None  # type: ignore[assignment]

    def __init__(self, clock: Clock, at: float, early: Iterable[tuple[float, Output]] = ()) -> None:
        self._clock = clock
        self._at = at
        self._early = list(early)

    def ready(self) -> bool:
        return self._clock.now() >= self._at

    def due_s(self) -> float | None:
        return min([self._at, *(at for at, _ in self._early)])

    def poll(self) -> Output | None:
        if not self._early or self._early[0][0] > self._clock.now():
            return None
        return self._early.pop(0)[1]


class Silent(Executor):
    """An executor without a time, which cannot be polled."""

    submit = collect = lambda *given, **keys: None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.is_ready = False

    def ready(self) -> bool:
        return self.is_ready


def state_of(clock: Clock, num_requests: int = 1) -> DecodeState:
    """Requests 7, 8, ... with a root (id 0) and two children (ids 1 and 2)."""
    requests = [new_request(7 + i, (1, 2), 99) for i in range(num_requests)]
    for request in requests:
        request.tree.append(np.array([0, 0]), np.array([3, 4]), np.full(2, -1.0))
    return new_state(*requests, clock=clock)


def nodes(*ids: int, request: int = 7) -> Nodes:
    return Nodes(((request, np.array(ids)),))


def early_output(*ids: int, request: int = 7) -> Output:
    states = torch.tensor(ids, dtype=torch.float64)[:, None]
    early = EarlyHidden(request=request, node_ids=np.array(ids), hidden={NAME: states})
    exits = Exits(
        request=request, node_ids=np.array(ids), candidates=Candidates.empty(len(ids)), layer=2
    )
    return Output(step=0, early=(early,), exits=(exits,))


def simulated(
    at: float = 1.0, early: Iterable[tuple[float, Output]] = (), *, beside: bool = True
) -> tuple[DecodeState, Source, LoopEvents]:
    """State, source and events on a simulated clock; the draft has a device where ``beside``."""
    state, source = state_of(SimulatedClock(PROFILE)), Source()
    drafting = Background(source=source, free_rank=DRAFT_RANK) if beside else source
    return state, source, LoopEvents(state, drafting, Target(state.clock, at, early))  # type: ignore


def drain(state: DecodeState, events: LoopEvents, num: int) -> list[tuple[EventKind, float]]:
    """The next events, with their times in ms."""
    found = []
    for _ in range(num):
        kind = events.next().kind
        found.append((kind, round(1e3 * state.clock.now(), 6)))
    return found


DRAFT, EARLY, TARGET = EventKind.DRAFT, EventKind.EARLY, EventKind.TARGET


class TestBackgroundOnPlannedTime:
    def test_paced_passes_end_at_their_planned_times(self) -> None:
        state, source = state_of(PacedClock(PROFILE)), Source()
        events = LoopEvents(state, Background(source=source, free_rank=DRAFT_RANK), Silent())  # type: ignore
        began = state.clock.now()
        first, second = events.start(nodes(1), 2), events.start(nodes(2), 2)
        assert first.due_s is not None
        assert second.due_s is not None
        assert first.due_s >= began + PASS_S
        assert second.due_s - first.due_s >= 0.999 * PASS_S
        for ticket in (first, second):
            assert events.next() == Event(DRAFT, ticket)
            assert state.clock.now() >= ticket.due_s
        assert source.threads == {threading.get_ident()}
        assert state.requests[7].tree.expanded.tolist() == [False, True, True]


class TestBackgroundInAThread:
    @pytest.fixture
    def held(self) -> Iterable[Held]:
        source = Held()
        yield source
        for _ in range(8):  # no thread may be left waiting
            source.go.release()

    def test_a_pass_runs_beside_the_caller_over_the_trees_as_they_were(self, held: Held) -> None:
        state = state_of(MeasuredClock())
        source = Background(source=held, free_rank=DRAFT_RANK)
        ticket = source.start(state, nodes(2), 2)
        assert ticket.due_s is None
        assert held.began.acquire(timeout=TIMEOUT_S)
        assert source.poll(ticket) is None
        state.requests[7].tree.reset(token=9, position=2)
        held.go.release()
        source._last.result(TIMEOUT_S)  # type: ignore[union-attr]
        found = source.poll(ticket)
        assert found is not None
        assert found.tokens.tolist() == [[10, 11]]
        assert held.contexts == [[1, 2, 4]]
        assert threading.get_ident() not in held.threads

    def test_what_is_said_during_a_pass_is_heard_after_it(self, held: Held) -> None:
        state = state_of(MeasuredClock(), num_requests=2)
        source = Background(source=held, free_rank=DRAFT_RANK)
        source.open(state.requests[7])
        assert held.log == ["open 7"], "at once while nothing runs"
        ticket = source.start(state, nodes(1), 2)
        assert held.began.acquire(timeout=TIMEOUT_S)
        source.commit([new_commit(7)], Output(step=0))
        source.close(7)
        source.open(state.requests[8])
        assert held.log == ["open 7"]
        held.go.release()
        source._last.result(TIMEOUT_S)  # type: ignore[union-attr]
        assert source.poll(ticket) is not None
        assert held.log == ["open 7", ((7, 1),), "commit [7]", "close 7", "open 8"]
        source.close(8)
        assert held.log[-1] == "close 8"

    def test_a_later_pass_knows_of_commits_during_an_earlier_one(self, held: Held) -> None:
        """A draft that never pauses: its cache once fell behind the trees that it was given."""
        state = state_of(MeasuredClock())
        source = Background(source=held, free_rank=DRAFT_RANK)
        first = source.start(state, nodes(1), 2)
        assert held.began.acquire(timeout=TIMEOUT_S)
        second = source.start(state, nodes(2), 2)
        source.commit([new_commit(7)], Output(step=0))
        third = source.start(state, nodes(1), 2)
        for _ in range(3):
            held.go.release()
        source._last.result(TIMEOUT_S)  # type: ignore[union-attr]
        assert all(source.poll(ticket) is not None for ticket in (first, second, third))
        assert held.log == [((7, 1),), ((7, 2),), "commit [7]", ((7, 1),)]

    def test_an_error_of_the_thread_is_raised_by_poll_and_expand(self) -> None:
        def fails(*_: object) -> Candidates:
            raise ArithmeticError("in the thread")

        inner = Source()
        inner.expand = fails  # type: ignore[method-assign]
        state, source = state_of(MeasuredClock()), Background(source=inner, free_rank=DRAFT_RANK)
        with pytest.raises(ArithmeticError, match="in the thread"):
            source.expand(state, nodes(1), 2)
        events = LoopEvents(state, source, Silent())  # type: ignore[arg-type]
        events.start(nodes(1), 2)
        with pytest.raises(ArithmeticError, match="in the thread"):
            events.next()
        source.close(7)
        assert inner.log == ["close 7"], "the caller may clean up"

    def test_events_wait_for_whichever_comes_first(self, held: Held) -> None:
        state, target = state_of(MeasuredClock()), Silent()
        events = LoopEvents(state, Background(source=held, free_rank=DRAFT_RANK), target)  # type: ignore
        ticket = events.start(nodes(1), 2)
        assert held.began.acquire(timeout=TIMEOUT_S)
        target.is_ready = True
        assert events.next() == Event(TARGET)
        target.is_ready = False
        timer = threading.Timer(0.02, held.go.release)
        timer.start()
        assert events.next() == Event(DRAFT, ticket)
        assert state.meter.wait_s > 0.0, "waits are declared"
        assert state.requests[7].tree.expanded.tolist() == [False, True, False]

    def test_a_finished_pass_wakes_a_wait_at_once(self, held: Held) -> None:
        """The wakeup must not come before the result, or the wait goes on to its next look."""
        source = Background(source=held, free_rank=DRAFT_RANK)
        results: list[bool] = []

        class Wakeup(threading.Event):
            def set(self) -> None:
                results.append(source._last is not None and source._last.done())
                super().set()

        wakeup = Wakeup()
        source.set_wakeup(wakeup)
        ticket = source.start(state_of(MeasuredClock()), nodes(1), 2)
        held.go.release()
        assert wakeup.wait(TIMEOUT_S)
        assert results == [True]
        assert source.poll(ticket) is not None


class TestSimulatedEvents:
    def test_they_come_in_the_order_of_their_times(self) -> None:
        early = [(0.005, early_output(0)), (0.007, early_output(1))]
        state, _, events = simulated(0.010, early)
        first, second = events.start(nodes(1), 2), events.start(nodes(2), 2)
        assert state.clock.now() == 0.0, "the passes take no time of the controller"
        assert events.running == [first, second]
        assert drain(state, events, 6) == [
            (DRAFT, 3.0), (EARLY, 5.0), (DRAFT, 6.0), (EARLY, 7.0), (TARGET, 10.0), (TARGET, 10.0),
        ]  # fmt: skip
        assert events.running == []

    def test_early_states_go_to_the_tree_and_exits_to_the_source(self) -> None:
        output = early_output(0, 2, 99)
        state, source, events = simulated(0.010, [(0.001, output)])
        assert drain(state, events, 1) == [(EARLY, 1.0)]
        assert source.log == ["commit []"]
        assert source.outputs == [output]
        found = state.requests[7].tree.hidden
        assert {i: float(rows[NAME]) for i, rows in found.items()} == {0: 0.0, 2: 2.0}

    def test_a_source_that_is_not_asynchronous_takes_its_time_at_once(self) -> None:
        state, _, events = simulated(0.002, beside=False)
        first = events.start(nodes(1), 2)
        second = events.start(nodes(2), 2)
        assert state.clock.now() == 2 * PASS_S
        found = [events.next() for _ in range(3)]
        assert found == [Event(DRAFT, first), Event(DRAFT, second), Event(TARGET)]
        assert state.clock.now() == 2 * PASS_S

    def test_a_part_that_is_due_and_silent_is_an_error_and_no_hang(self) -> None:
        state, _, events = simulated(0.002)
        events._executor.ready = lambda: False  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"nothing happened at 0\.002 s"):
            events.next()
        assert state.clock.now() == 0.002

    def test_with_nothing_else_to_wait_for_collect_is_the_one_that_waits(self) -> None:
        """An executor may need its ``collect`` to notice that a rank has failed."""
        state = state_of(SimulatedClock(PROFILE))
        events = LoopEvents(state, Source(), Silent())  # type: ignore[arg-type]
        assert events.next() == Event(TARGET)
        assert not events.ready()
