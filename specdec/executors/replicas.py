"""Copies of the target that answer batches at the same time, each on separate devices.

Each batch goes to the first copy that is free. Copies do not wait for each other, so answers come
in any order, and a step has no fixed latency. Copies share no caches: with each batch, a copy also
computes the cache entries of its paths that it lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import sleep
from typing import Any, Literal

import numpy as np

from specdec.clocks import CONTROLLER, Clock, ClockKind
from specdec.clocks.build import check_in_process
from specdec.clocks.meter import Meter
from specdec.errors import RankFailure, UserError
from specdec.executors.layout import PipelinePlan, StageLayout
from specdec.executors.local import LocalExecutor
from specdec.executors.models import Blocks, ModelPair, OverRanks
from specdec.interfaces import Executor
from specdec.parts.fields import Count
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.state import RequestState, tree_rows
from specdec.types import (
    NO_NODE,
    Answers,
    Batch,
    Commit,
    ExecutorPlan,
    IntArray,
    Needs,
    NodeMap,
    Output,
    Placement,
    PrefillChunk,
    TreeRows,
)

_LOOK_EVERY_S = 1e-3  # between two looks at the copies' processes


@dataclass(frozen=True, kw_only=True)
class ReplicasPlan(ExecutorPlan):
    copies: tuple[PipelinePlan, ...]
    distributed: bool


class ReplicasExecutor(Executor):
    """Runs N copies of the target on ranks 1 .. N, which answer up to N batches at the same time;
    ``counters`` leave out rows that a copy computes again.
    """

    latency = None

    @classmethod
    def plan(
        cls,
        models: ModelPair,
        *,
        replicas: Count = 2,
        transport: Literal["in_process", "distributed"] = "in_process",
        timeout_s: float = 60.0,  # noqa: ARG003 - read by those who start the ranks
    ) -> ReplicasPlan:
        """Plans ``replicas`` copies, one device each; nothing is loaded."""
        placements = {
            name: Placement(ranks=(CONTROLLER,), weight_bytes=(size,))
            for name, size in models.weight_bytes.items()
        }
        size = models.weight_bytes["target"]
        ranks = tuple(range(1, replicas + 1))
        placements["target"] = Placement(ranks=ranks, weight_bytes=(size,) * replicas)
        distributed = transport == "distributed"
        one = PipelinePlan.of(models, StageLayout(stages=1), distributed=distributed)
        return ReplicasPlan(
            latency=None,
            in_flight=replicas,
            placements=placements,
            copies=tuple(replace(one, group_number=number) for number in ranks),
            distributed=distributed,
        )

    @classmethod
    def build(
        cls,
        plan: ReplicasPlan,
        needs: Needs,
        *,
        pair: ModelPair,
        clock: Clock,
        meter: Meter,
        draws: KeyedDraws,
        blocks: Blocks,
        over_ranks: OverRanks | None,
    ) -> ReplicasExecutor:
        """Loads the copies, in this process or (``over_ranks``) in one process each. UserError for
        processes with a paced clock, which has the schedule of only one target.
        """
        needs = replace(needs, hidden=(), early_hidden=())
        if not plan.distributed or over_ranks is None:
            check_in_process(clock.kind, tracing=clock.timeline is not None)
            how: dict[str, Any] = {"pair": pair, "meter": meter, "draws": draws, "blocks": blocks}
            inside = [LocalExecutor.build(plan, needs, clock=clock, **how) for _ in plan.copies]
            return cls(inside, clock=clock, meter=meter)
        if clock.kind is ClockKind.PACED:
            raise UserError(
                "clock=paced paces the processes of one target, executor=replicated has several:"
                " use clock=measured, or clock=simulated"
            )
        bounds = [(0, pair.num_layers)]
        remote: list[Any] = []
        try:
            for copy_plan in plan.copies:
                remote.append(over_ranks(copy_plan, needs, bounds=bounds, exits=()))
        except BaseException:
            for copy in remote:
                copy.shutdown()
            raise
        return cls(remote, clock=clock, meter=meter, remote=True)

    def __init__(
        self, copies: Sequence[Executor], *, clock: Clock, meter: Meter, remote: bool = False
    ) -> None:
        """Combines executors of latency 1, one per copy. Unless they are in other processes
        (``remote``), work of copy i (from 0) is charged to rank i + 1 of the clock.
        """
        self.in_flight = len(copies)
        self._clock, self._meter, self.distributed = clock, meter, remote
        self._copies = [
            TargetCopy(executor, clock, None if remote else rank)
            for rank, executor in enumerate(copies, 1)
        ]
        self._queue: list[Batch] = []
        self._requests: dict[int, RequestState] = {}
        self._step = 0
        self._is_empty = True  # whether the step's batch has no nodes

    def open(self, request: RequestState) -> None:
        self._requests[request.id] = request
        for copy in self._copies:
            copy.open(request)

    def submit(self, batch: Batch) -> None:
        self._step, self._is_empty = batch.step, not batch.trees
        if batch.trees:
            self.counters.count(replace(batch, prefills=()))
            self._queue.append(batch)
            self._dispatch()

    def ready(self) -> bool:
        return any(copy.ready() for copy in self._copies)

    def due_s(self) -> float | None:
        due = [copy.due_s for copy in self._copies if copy.is_busy and copy.due_s is not None]
        return min(due, default=None)

    def collect(self, *, wait: bool = True) -> Output:
        busy = [copy for copy in self._copies if copy.is_busy]
        must_wait = self._is_empty or len(busy) == self.in_flight
        if wait and must_wait and busy and not self.ready():
            self._wait(busy)
        answers: list[Answers] = []
        for copy in self._copies:
            if copy.ready():
                answers += copy.finish()
        return Output(step=self._step, answers=tuple(answers))

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        if commits:
            for copy in self._copies:
                copy.commit(commits)
        self._dispatch()

    def close(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        for copy in self._copies:
            copy.close(request_id)

    def shutdown(self) -> None:
        """Frees the copies' models and releases their processes for the next run. Passes still
        running are first finished and their answers dropped; after an error, busy processes are
        ended.
        """
        for copy in self._copies:
            if copy.is_busy and not self._requests:
                with suppress(RankFailure):
                    copy.finish()
            copy.executor.shutdown()

    def reports(self) -> list[dict[str, Any]]:
        if not self.distributed:
            return []
        found = []
        for rank, copy in enumerate(self._copies, 1):
            (report,) = copy.executor.reports()
            spans = [{**span, "rank": rank} for span in report["clock"]["spans"]]
            found.append({**report, "clock": {**report["clock"], "rank": rank, "spans": spans}})
        return found

    @property
    def pids(self) -> list[int]:
        return [pid for copy in self._copies for pid in copy.executor.pids or ()]

    @property
    def bytes_sent(self) -> int:
        return sum(copy.executor.bytes_sent for copy in self._copies)

    @property
    def stage_of_rank(self) -> dict[int, int]:
        return dict.fromkeys(range(1, self.in_flight + 1), 1)

    def set_wakeup(self, event: threading.Event) -> bool:
        willing = [copy.executor.set_wakeup(event) for copy in self._copies]
        return all(willing)

    def _dispatch(self) -> None:
        """Starts queued batches on free copies, after dropping nodes that have left the trees."""
        while self._queue and (free := [c for c in self._copies if not c.is_busy]):
            batch = self._queue.pop(0)
            trees = tuple(map(self._live, batch.trees))
            batch = replace(batch, trees=tuple(rows for rows in trees if rows is not None))
            if batch.trees:
                free[0].start(batch)

    def _live(self, rows: TreeRows) -> TreeRows | None:
        request = self._requests.get(rows.request)
        if request is None or request.finished:  # a finished one is closed in the next step
            return None
        slots = request.tree.slots(rows.node_ids)
        slots = slots[slots != NO_NODE]
        return tree_rows(request, slots) if len(slots) else None

    def _wait(self, busy: Sequence[TargetCopy]) -> None:
        due = [copy.due_s for copy in busy if copy.due_s is not None]
        if due:
            self._clock.wait_until(min(due))
            return
        with self._meter.waiting():
            while not self.ready():
                for copy in busy:
                    copy.executor.poll()  # raises if a process has failed
                sleep(_LOOK_EVERY_S)


class TargetCopy:
    """One copy of the target, and a record of what its caches contain. The record needs no
    messages: each batch brings the missing entries of its paths, and commits act on the record as
    they do on the caches.
    """

    def __init__(self, executor: Executor, clock: Clock, rank: int | None) -> None:
        self.executor = executor
        self.is_busy = False
        self.due_s: float | None = None
        self._clock, self._rank = clock, rank
        self._requests: dict[int, RequestState] = {}
        self._cached_len: dict[int, int] = {}  # committed tokens in the caches
        self._nodes: NodeMap[None] = NodeMap()  # nodes in the caches
        self._requested: dict[int, IntArray] = {}  # request -> nodes of the current batch
        self._output: Output | None = None
        self._deferred: list[Commit] = []
        self._opened_since: set[int] = set()  # requests unknown to the process of a busy copy

    def open(self, request: RequestState) -> None:
        self.executor.open(request)
        self._requests[request.id], self._cached_len[request.id] = request, 0
        self._nodes.open(request.id)
        if self.is_busy:
            self._opened_since.add(request.id)

    def close(self, request_id: int) -> None:
        self.executor.close(request_id)
        self._requests.pop(request_id, None)
        self._cached_len.pop(request_id, None)
        self._nodes.close(request_id)
        self._requested.pop(request_id, None)
        self._opened_since.discard(request_id)
        self._deferred = [commit for commit in self._deferred if commit.request != request_id]

    def start(self, batch: Batch) -> None:
        self._catch_up(batch.step)
        self.is_busy = True
        self._requested = {rows.request: rows.node_ids for rows in batch.trees}
        whole = self._completed(batch)
        with nullcontext() if self._rank is None else self._clock.on(self._rank):
            self.executor.submit(whole)
            if self._rank is not None:
                self._output = self.executor.collect()
        if self._rank is not None:
            self.due_s = self._clock.ends_s(self._rank)

    def ready(self) -> bool:
        if not self.is_busy:
            return False
        if self._rank is None:
            return bool(self.executor.ready())
        return self.due_s is None or self.due_s <= self._clock.now()

    def finish(self) -> list[Answers]:
        """Returns answers to the batch's nodes, not to ancestors that only filled the cache."""
        output = self.executor.collect() if self._output is None else self._output
        self.is_busy, self._output, self.due_s = False, None, None
        if self._rank is None:
            # The process learns of requests opened since then with its next batch.
            late = [c for c in self._deferred if c.request in self._opened_since]
            known = [c for c in self._deferred if c.request not in self._opened_since]
            self.executor.commit(known, output)
            self._deferred, self._opened_since = late, set()
        return [
            _only(a, self._requested[a.request])
            for a in output.answers
            if a.request in self._requested
        ]

    def commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if (cached_len := self._cached_len.get(commit.request)) is None:
                continue
            # A node is in the caches only with its whole path.
            num_cached = sum(i in self._nodes[commit.request] for i in commit.retired_ids.tolist())
            self._cached_len[commit.request] = cached_len + num_cached
        self._nodes.commit(commits)
        if self._rank is None:
            self._deferred += commits
        else:  # its batch is computed already
            self.executor.commit(commits, Output(step=commits[0].step))

    def _catch_up(self, step: int) -> None:
        if self._deferred:
            self.executor.submit(Batch(step=step))
            self.executor.commit(self._deferred, self.executor.collect())
            self._deferred = []

    def _completed(self, batch: Batch) -> Batch:
        trees, prefills = [], []
        for rows in batch.trees:
            request, nodes = self._requests[rows.request], self._nodes[rows.request]
            tree, start = request.tree, self._cached_len[request.id]
            if start < request.prefix_len:
                missing = request.tokens[start : request.prefix_len]
                prefills.append(PrefillChunk(request=request.id, start=start, tokens=missing))
                self._cached_len[request.id] = request.prefix_len
            has = partial(np.isin, test_elements=list(nodes))
            slots = tree.with_missing_ancestors(tree.slots(rows.node_ids), has)
            nodes.update(dict.fromkeys(tree.ids[slots].tolist()))
            trees.append(tree_rows(request, slots))
        return replace(batch, trees=tuple(trees), prefills=tuple(prefills))


def _only(answers: Answers, ids: IntArray) -> Answers:
    rows = np.flatnonzero(np.isin(answers.node_ids, ids))
    return Answers(
        request=answers.request,
        node_ids=answers.node_ids[rows],
        tokens=answers.tokens[rows],
        probs=None if answers.probs is None else answers.probs[rows],
    )
