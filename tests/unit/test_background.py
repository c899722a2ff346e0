"""Draft passes that run beside the loop, on simulated, paced and measured clocks."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import pytest
from free_drafts import (
    DRAFT,
    DRAFT_RANK,
    PASS_S,
    PROFILE,
    TARGET,
    TIMEOUT_S,
    Held,
    Silent,
    Source,
    new_state,
    nodes,
)

from specdec.clocks import CONTROLLER, MeasuredClock, PacedClock, SimulatedClock, Work
from specdec.sources.background import Background
from specdec.sources.events import LoopEvents
from specdec.types import Candidates, Commit, CommitKind, Event, Output


class TestBackgroundOnPlannedTime:
    def test_passes_follow_each_other_and_never_begin_before_they_are_started(self) -> None:
        state = new_state(SimulatedClock(PROFILE))
        source = Background(source=Source(), free_rank=DRAFT_RANK)
        due = [source.start(state, nodes(i), 1).due_s for i in (1, 2)]
        assert due == pytest.approx([0.003, 0.006])
        state.clock.wait_until(0.004)
        assert source.start(state, nodes(1), 1).due_s == pytest.approx(0.009), "after the others"
        state.clock.wait_until(0.020)
        assert source.start(state, nodes(1), 1).due_s == pytest.approx(0.023), "from now"

    def test_a_result_is_there_when_the_pass_has_ended_and_not_before(self) -> None:
        state = new_state(SimulatedClock(PROFILE))
        source = Background(source=Source(), free_rank=DRAFT_RANK)
        ticket = source.start(state, nodes(1), 2)
        state.clock.wait_until(0.0029)
        assert source.poll(ticket) is None
        state.clock.wait_until(0.003)
        found = source.poll(ticket)
        assert found is not None
        assert found.tokens.tolist() == [[10, 11]]
        with pytest.raises(KeyError):
            source.poll(ticket)

    def test_expand_waits_for_the_passes_before_it_and_for_its_own(self) -> None:
        state = new_state(SimulatedClock(PROFILE))
        source = Background(source=Source(), free_rank=DRAFT_RANK)
        ticket = source.start(state, nodes(1), 2)
        assert source.expand(state, nodes(2), 2).tokens.tolist() == [[10, 11]]
        assert state.clock.now() == pytest.approx(2 * PASS_S)
        assert source.poll(ticket) is not None

    def test_the_draft_has_its_own_rank_on_the_clock(self) -> None:
        clock = SimulatedClock(PROFILE)
        state, source = new_state(clock), Background(source=Source(), free_rank=DRAFT_RANK)
        source.start(state, nodes(1), 2)
        clock.charge(CONTROLLER, Work.DRAFT, 1)  # the controller works meanwhile
        assert dict(clock.busy_s) == pytest.approx({DRAFT_RANK: PASS_S, CONTROLLER: PASS_S})
        assert not clock.busy(DRAFT_RANK)

    def test_paced_passes_end_at_their_planned_times(self) -> None:
        state, source = new_state(PacedClock(PROFILE)), Source()
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


def a_commit() -> Commit:
    return Commit(
        request=7,
        step=0,
        kind=CommitKind.HIT,
        retired_ids=np.array([0]),
        retired_tokens=np.array([2]),
        next_token=3,
        root_id=1,
        prefix_len=2,
        kept_ids=np.array([1]),
    )


class TestBackgroundInAThread:
    @pytest.fixture
    def held(self) -> Iterable[Held]:
        source = Held()
        yield source
        for _ in range(8):  # no thread may be left waiting
            source.go.release()

    def test_a_pass_runs_beside_the_caller_over_the_trees_as_they_were(self, held: Held) -> None:
        state = new_state(MeasuredClock())
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
        state = new_state(MeasuredClock(), num_requests=2)
        source = Background(source=held, free_rank=DRAFT_RANK)
        source.open(state.requests[7])
        assert held.log == ["open 7"], "at once while nothing runs"
        ticket = source.start(state, nodes(1), 2)
        assert held.began.acquire(timeout=TIMEOUT_S)
        source.commit([a_commit()], Output(step=0))
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
        state = new_state(MeasuredClock())
        source = Background(source=held, free_rank=DRAFT_RANK)
        first = source.start(state, nodes(1), 2)
        assert held.began.acquire(timeout=TIMEOUT_S)
        second = source.start(state, nodes(2), 2)
        source.commit([a_commit()], Output(step=0))
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
        state, source = new_state(MeasuredClock()), Background(source=inner, free_rank=DRAFT_RANK)
        with pytest.raises(ArithmeticError, match="in the thread"):
            source.expand(state, nodes(1), 2)
        events = LoopEvents(state, source, Silent())  # type: ignore[arg-type]
        events.start(nodes(1), 2)
        with pytest.raises(ArithmeticError, match="in the thread"):
            events.next()
        source.close(7)
        assert inner.log == ["close 7"], "the caller may clean up"

    def test_events_wait_for_whichever_comes_first(self, held: Held) -> None:
        state, target = new_state(MeasuredClock()), Silent()
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
        ticket = source.start(new_state(MeasuredClock()), nodes(1), 2)
        held.go.release()
        assert wakeup.wait(TIMEOUT_S)
        assert results == [True]
        assert source.poll(ticket) is not None
