"""Copies of the target: what each receives, when, and in which order copies answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specdec.certify.cases import GREEDY, Case
from specdec.clocks import CostCurve, LatencyProfile, MeasuredClock, SimulatedClock
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Workbench, build
from specdec.errors import RankFailure
from specdec.executors.replicas import ReplicasExecutor, TargetCopy
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.state import StopRules, batch_of
from specdec.types import Answers, Batch, Commit, Needs, Nodes, Output
from specdec.verifiers import MatchVerifier
from tests import toys
from tests.states import new_commit, new_request, new_state
from tests.unit.test_state import chain_of


class _Process:
    """An executor whose process learns of requests with a batch, as ``DistributedExecutor``'s."""

    pids, bytes_sent = (7,), 5

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.commits: list[tuple[int, int]] = []  # request, step
        self._opens: list[int] = []
        self._closes: list[int] = []
        self._in_step = False
        self.error: Exception | None = None
        self._looks = 0

    def open(self, request: Any) -> None:
        self._opens.append(request.id)

    def close(self, request_id: int) -> None:
        self._closes.append(request_id)

    def submit(self, batch: Batch) -> None:
        assert not self._in_step
        self._in_step = True
        self.known = (self.known | {*self._opens}) - {*self._closes}
        self._opens, self._closes = [], []
        self._batch, self._looks = batch, 0

    def ready(self) -> bool:
        return self._looks > 1

    def poll(self) -> None:
        self._looks += 1
        if self.error is not None:
            raise self.error

    def collect(self) -> Output:
        assert self._in_step
        assert self.error is None, "an answer that never comes"
        answers = [
            Answers(request=t.request, node_ids=t.node_ids, tokens=t.tokens)
            for t in self._batch.trees
        ]
        return Output(step=0, answers=tuple(answers))

    def reports(self) -> list[dict[str, Any]]:
        return [{"clock": {"rank": 1, "spans": [{"rank": 1}]}}]

    def shutdown(self) -> None:
        assert self._in_step == (self.error is not None), "busy only after an error"

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        assert self._in_step
        self._in_step = False
        for commit in commits:
            assert commit.request in self.known, "the process has not heard of the request"
            self.commits.append((commit.request, commit.step))


def _commit(request: int, step: int) -> Commit:
    return new_commit(request, step, retired=(step,), kept=(step + 1,), prefix_len=step)


def test_commits_wait_until_the_process_knows_their_request() -> None:
    """A request that opens while the copy is busy reaches its process with the next batch."""
    process = _Process()
    copy = TargetCopy(process, MeasuredClock(), None)  # type: ignore[arg-type]
    copy.open(new_request(1))
    copy.start(Batch(step=1))
    copy.open(new_request(2))
    copy.commit([_commit(1, 1), _commit(2, 1)])
    copy.commit([_commit(2, 2)])
    copy.finish()
    assert process.commits == [(1, 1)]
    copy.commit([_commit(1, 3)])
    copy.start(Batch(step=4))
    assert process.commits == [(1, 1), (2, 1), (2, 2), (1, 3)], "all, in their order"
    copy.commit([_commit(2, 4)])
    copy.finish()
    assert process.commits[-1] == (2, 4)
    copy.commit([_commit(1, 5), _commit(2, 5)])
    copy.start(Batch(step=6))
    copy.commit([_commit(1, 6), _commit(2, 6)])
    copy.close(2)
    copy.finish()
    assert process.commits[-3:] == [(1, 5), (2, 5), (1, 6)], "none of a closed request"


def test_each_batch_is_answered_when_its_copy_is_done() -> None:
    """A pass takes a second per row. A copy also computes the prefix and the ancestors that it
    lacks, which are neither answered nor counted. No node of a closed request is answered, even
    if another request has the same id.
    """
    curve = CostCurve(tokens=(1, 2), ms=(1e3, 2e3))
    clock = SimulatedClock(LatencyProfile(name="1 s per row", costs={"stage": curve}))  # type: ignore[dict-item]
    executor = build("dsi", Workbench(toys.pair(), clock=clock), replicas=2).executor
    rules = StopRules(max_new_tokens=9)
    plain = toys.plain(Case(1, "", (5, 6, 7), GREEDY, rules))
    request = new_request(1, (5, 6, 7))
    state = new_state(request, clock=clock)
    executor.open(request)
    chain_of(request, *plain[:3], (plain[3] + 1) % toys.VOCAB)  # nodes 1 .. 4

    def step(*ids: int, wait: bool = True) -> tuple[list[int], float]:
        """(ids of answered nodes, time in seconds) after a step with nodes ``ids``."""
        nodes = Nodes(((1, np.array(ids)),)) if ids else Nodes()
        executor.submit(batch_of(state, nodes))
        output = executor.collect(wait=wait)
        requests = state.receive(output)
        executor.commit(state.commit(MatchVerifier().verify(state, requests)), output)
        answered = [node_id for a in output.answers for node_id in a.node_ids.tolist()]
        return answered, clock.now()

    assert step(0) == ([], 0), "a copy is free"
    assert step(1, 2) == ([0], 3), "no copy is free"
    assert executor.due_s() == 5
    assert step(3) == ([1, 2], 5), "the first copy computes nodes 1, 2 and 3"
    assert executor.due_s() == 6
    assert step() == ([3], 6), "nothing is submitted"

    # A miss: the second copy lacks node 3's token.
    chain_of(request, *plain[4:6])  # nodes 6 and 7
    assert step(5) == ([], 6)
    assert step(6, wait=False) == ([], 6)
    assert step(7) == ([5], 7), "no copy is free: node 7 is queued until now"
    assert executor.due_s() == 9
    assert step() == ([7, 6], 9), "of both copies"
    assert tuple(request.output) == plain[:7]
    counters = executor.counters
    assert (counters.passes, counters.rows, counters.prefill_rows) == (6, 7, 0)

    # A miss: the second copy lacks node 7's token.
    chain_of(request, 0, 0)  # nodes 9 and 10
    for node_id in (8, 9, 10):
        assert step(node_id, wait=False) == ([], 9)
    assert executor.due_s() == 10
    executor.close(1)
    del state.requests[1]
    assert step() == ([], 10), "the first copy is done, and node 10 is not begun"
    state.requests[1] = again = new_request(1, (8, 9))
    executor.open(again)
    assert step(0) == ([0], 12), "both copies are done"
    assert again.output == [toys.plain(Case(1, "", (8, 9), GREEDY, rules))[0]]
    assert executor.due_s() is None


@pytest.mark.parametrize("fails", [False, True])
def test_answers_of_processes_are_waited_for_and_failures_raised(fails: bool) -> None:
    processes = [_Process(), _Process()]
    plan = ReplicasExecutor.plan(toys.pair(), replicas=2, transport="distributed")
    executor = ReplicasExecutor.build(
        plan,
        Needs(),
        pair=toys.pair(),
        clock=MeasuredClock(),
        meter=Meter(),
        draws=KeyedDraws(seed=0),
        blocks=(None, 16),
        over_ranks=lambda one, *_, **__: processes[one.group_number - 1],
    )
    clocks = [report["clock"] for report in executor.reports()]
    assert clocks == [{"rank": rank, "spans": [{"rank": rank}]} for rank in (1, 2)]
    assert (executor.pids, executor.bytes_sent) == ([7, 7], 10)
    assert executor.stage_of_rank == {1: 1, 2: 1}
    request = new_request(1)
    executor.open(request)
    batch = batch_of(new_state(request), Nodes(((1, np.array([0])),)))
    executor.submit(batch)
    assert not executor.collect().answers, "a copy is free"
    executor.submit(batch)
    assert executor.due_s() is None
    if fails:
        processes[0].error = processes[1].error = RankFailure(rank=1, cause="planted")
        with pytest.raises(RankFailure, match="planted"):
            executor.collect()
    else:
        assert len(executor.collect().answers) == 2
        executor.submit(batch)
        executor.close(1)
    executor.shutdown()
