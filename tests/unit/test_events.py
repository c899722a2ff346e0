"""What happens while the target works, in the order in which it happens."""

from __future__ import annotations

import pytest
from free_drafts import (
    DRAFT,
    EARLY,
    NAME,
    PASS_S,
    PROFILE,
    TARGET,
    Silent,
    Source,
    drain,
    early_output,
    new_state,
    nodes,
    simulated,
)

from specdec.clocks import SimulatedClock
from specdec.sources.events import LoopEvents
from specdec.state import DecodeState
from specdec.types import Candidates, Event, Nodes


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

    def test_at_one_time_drafts_are_first_and_the_target_is_last(self) -> None:
        state, _, events = simulated(PASS_S, [(PASS_S, early_output(0))])
        events.start(nodes(1), 2)
        assert drain(state, events, 4) == [(DRAFT, 3.0), (EARLY, 3.0), (TARGET, 3.0), (TARGET, 3.0)]

    def test_what_happened_while_the_policy_was_busy_is_kept(self) -> None:
        state, _, events = simulated(0.002, [(0.001, early_output(0))])
        tickets = [events.start(nodes(1), 2), events.start(nodes(2), 2)]
        state.clock.wait_until(0.008)
        found = [events.next() for _ in range(4)]
        assert found[:2] == [Event(DRAFT, ticket) for ticket in tickets], "as they began"
        assert [event.kind for event in found[2:]] == [EARLY, TARGET]
        assert state.clock.now() == 0.008

    def test_a_pass_may_outlive_its_step(self) -> None:
        state, _, events = simulated(0.002)
        ticket = events.start(nodes(0), 2)
        assert drain(state, events, 1) == [(TARGET, 2.0)]
        assert events.running == [ticket]
        assert not state.requests[7].tree.expanded.any()
        events._executor._at = 0.004  # the next step
        assert drain(state, events, 2) == [(DRAFT, 3.0), (TARGET, 4.0)]
        assert state.requests[7].tree.expanded[0]

    def test_candidates_are_stored_where_their_nodes_live(self) -> None:
        state, _, events = simulated(0.010)
        tree = state.requests[7].tree
        ticket = events.start(nodes(1, 2), 3)
        tree.reroot(1)  # node 2 is pruned while the pass runs
        assert not tree.expanded.any()
        assert events.next() == Event(DRAFT, ticket)
        assert (tree.ids.tolist(), tree.expanded.tolist()) == ([1], [True])
        assert tree.candidate_tokens.tolist() == [[10, 11, 12]]

    def test_a_pass_over_a_closed_request_is_dropped(self) -> None:
        state, _, events = simulated(0.010)
        events.start(nodes(1, 2), 3)
        del state.requests[7]
        assert drain(state, events, 2) == [(DRAFT, 3.0), (TARGET, 10.0)]

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

    def test_drafting_is_marked_as_such(self) -> None:
        state, source, events = simulated()
        marks: list[bool] = []
        right = source.expand

        def noting(view: DecodeState, asked: Nodes, k: int) -> Candidates:
            marks.append(view.clock.drafting and view.meter.drafting)
            return right(view, asked, k)

        source.expand = noting  # type: ignore[method-assign]
        events.start(nodes(1), 2)
        assert marks == [True]
        assert not state.clock.drafting

    def test_a_part_that_is_due_and_silent_is_an_error_and_no_hang(self) -> None:
        state, _, events = simulated(0.002)
        events._executor.ready = lambda: False  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"nothing happened at 0\.002 s"):
            events.next()
        assert state.clock.now() == 0.002

    def test_with_nothing_else_to_wait_for_collect_is_the_one_that_waits(self) -> None:
        """An executor may need its ``collect`` to notice that a rank has failed."""
        state = new_state(SimulatedClock(PROFILE))
        events = LoopEvents(state, Source(), Silent())  # type: ignore[arg-type]
        assert events.next() == Event(TARGET)
        assert not events.ready()
