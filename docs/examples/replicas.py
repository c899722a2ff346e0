"""An executor outside the library: copies of the target, each of which answers batches alone.

A batch goes to the copy that is free first. Copies do not wait for each other, so answers come in
any order, and a step has no fixed latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from specdec.clocks import CONTROLLER, Clock, ClockKind, Work
from specdec.clocks.meter import Meter
from specdec.executors.models import Blocks, ModelPair
from specdec.executors.stage import Answerer, Stage
from specdec.interfaces import Executor
from specdec.parts.fields import Count
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.state import RequestState, tree_rows
from specdec.types import (
    Answers,
    Batch,
    Commit,
    ExecutorPlan,
    Needs,
    Output,
    Placement,
    PrefillChunk,
    TreeRows,
)


@dataclass
class _Pending:
    """A batch that a copy works on: its answers, and when they are there.

    On a measured clock, where the copies share this process, ``due`` counts calls of ``collect``.
    """

    answers: tuple[Answers, ...]
    due: float


class Replicas(Executor):
    """``replicas`` copies of the target on devices 1, 2, ..."""

    latency = None  # answers come when they come

    @classmethod
    def plan(
        cls,
        models: ModelPair,
        *,
        replicas: Count = 2,
        delay_ms: Annotated[float, Field(ge=0)] = 0.0,
    ) -> ExecutorPlan:
        """The keys of its YAML, and what follows from them before anything is loaded.

        Args:
            models: target and draft.
            replicas: number of copies.
            delay_ms: mean of a random delay of each answer, as on a network.
        """
        placements = {
            name: Placement(ranks=(CONTROLLER,), weight_bytes=(size,))
            for name, size in models.weight_bytes.items()
        }
        size = models.weight_bytes["target"]
        ranks = tuple(range(1, replicas + 1))
        placements["target"] = Placement(ranks=ranks, weight_bytes=(size,) * replicas)
        return ReplicasPlan(
            latency=None, in_flight=replicas, placements=placements, delay_ms=delay_ms
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
    ) -> Replicas:
        """Loads the copies; the named arguments are objects of the run."""
        copies = [
            _Copy(
                stage=pair.stage(0, pair.num_layers, meter).paged(*blocks),
                answerer=pair.answerer(draws=draws, needs_probs=needs.target_probs),
            )
            for _ in plan.placements["target"].ranks
        ]
        return cls(copies, clock=clock, delay_ms=plan.delay_ms)

    def __init__(self, copies: Sequence[_Copy], *, clock: Clock, delay_ms: float = 0.0) -> None:
        """Composes the executor."""
        self.in_flight = len(copies)
        self._copies = list(copies)
        self._clock = clock
        self._delay_ms = delay_ms
        self._random = np.random.default_rng(0)
        self._pending: list[_Pending] = []
        self._step = 0
        self._is_empty = True  # whether the step's batch is empty
        self._num_collects = 0

    def open(self, request: RequestState) -> None:
        """Allocates the request's cache on every copy."""
        for copy in self._copies:
            copy.open(request)

    def submit(self, batch: Batch) -> None:
        """Gives the batch to the copy that is free first. Prompts are read with the first nodes."""
        self._step, self._is_empty = batch.step, not batch.trees
        if batch.num_tokens:
            self.counters.count(batch)
        if not batch.trees:
            return
        times = [self._clock.ends_s(rank) or 0.0 for rank in self._ranks]
        first = min(range(len(times)), key=lambda i: (times[i], self._random.random()))
        rank, answers = self._ranks[first], self._copies[first].answer(batch)
        self._clock.start(CONTROLLER)  # so that the copy's work is not counted as the controller's
        self._clock.align(rank, CONTROLLER)
        self._clock.charge(rank, Work.STAGE, self._copies[first].num_rows)
        self._clock.charge(rank, Work.HEAD, batch.num_nodes)
        end = self._clock.ends_s(rank)
        if end is None:  # measured: this process has computed them already; hold them back
            due = self._num_collects + int(self._random.integers(5))
            self._pending.append(_Pending(answers, due))
        else:
            delay = self._random.exponential(self._delay_ms) if self._delay_ms else 0.0
            self._pending.append(_Pending(answers, end + delay * 1e-3))

    def ready(self) -> bool:
        """Whether answers have arrived."""
        return any(pending.due <= self._now() for pending in self._pending)

    def due_s(self) -> float | None:
        """When the next answers arrive; None on a measured clock, or if nothing is in flight."""
        if self._clock.kind is ClockKind.MEASURED:
            return None
        return min((pending.due for pending in self._pending), default=None)

    def collect(self, *, wait: bool = True) -> Output:
        """The answers that have arrived; see ``Executor``."""
        self._num_collects += 1
        must_wait = self._is_empty or len(self._pending) >= self.in_flight
        if wait and must_wait and self._pending and not self.ready():
            first = min(pending.due for pending in self._pending)
            if self._clock.kind is ClockKind.MEASURED:
                self._num_collects = int(first)
            else:
                self._clock.wait_until(first)
        now = self._now()
        arrived = [pending for pending in self._pending if pending.due <= now]
        self._pending = [pending for pending in self._pending if pending.due > now]
        answers = tuple(answer for pending in arrived for answer in pending.answers)
        return Output(step=self._step, answers=answers)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Prunes the caches. Answers in flight stay; the trees drop those of pruned nodes."""
        for copy in self._copies:
            copy.commit(commits)

    def close(self, request_id: int) -> None:
        """Frees the request's caches."""
        for copy in self._copies:
            copy.close(request_id)
        for pending in self._pending:
            pending.answers = tuple(a for a in pending.answers if a.request != request_id)

    @property
    def _ranks(self) -> range:
        return range(1, self.in_flight + 1)

    def _now(self) -> float:
        measured = self._clock.kind is ClockKind.MEASURED
        return self._num_collects if measured else self._clock.now()


@dataclass(frozen=True, kw_only=True)
class ReplicasPlan(ExecutorPlan):
    """``ExecutorPlan`` with the mean delay of an answer in milliseconds."""

    delay_ms: float


class _Copy:
    """One copy of the target. It computes what it lacks of a batch's paths along with the batch."""

    def __init__(self, *, stage: Stage, answerer: Answerer) -> None:
        self._stage = stage
        self._answerer = answerer
        self._requests: dict[int, RequestState] = {}
        self.num_rows = 0  # of the last batch, with the rows that were lacking

    def open(self, request: RequestState) -> None:
        self._stage.open(request.id, request.num_prompt + request.stop.max_new_tokens)
        self._answerer.open(request)
        self._requests[request.id] = request

    def answer(self, batch: Batch) -> tuple[Answers, ...]:
        """The answers to the batch's tree rows."""
        whole = self._completed(batch)
        self.num_rows = whole.num_tokens
        logits = self._stage.run(whole, None).logits
        answers = self._answerer.answer(whole, logits)
        return tuple(map(_without_ancestors, answers, batch.trees))

    def commit(self, commits: Sequence[Commit]) -> None:
        self._stage.commit(commits)
        self._answerer.commit(commits)

    def close(self, request_id: int) -> None:
        self._stage.close(request_id)
        self._answerer.close(request_id)
        self._requests.pop(request_id, None)

    def _completed(self, batch: Batch) -> Batch:
        """The batch with the committed tokens and the ancestors that the caches lack."""
        layers = self._stage.layers
        if layers is None:  # a synthetic target has no caches
            return replace(batch, prefills=())
        trees, prefills = [], []
        for rows in batch.trees:
            request, cache = self._requests[rows.request], layers.cache(rows.request)
            tree, start = request.tree, cache.cached_len
            if start < request.prefix_len:
                missing = request.tokens[start : request.prefix_len]
                prefills.append(PrefillChunk(request=request.id, start=start, tokens=missing))
            slots = tree.with_missing_ancestors(tree.slots(rows.node_ids), cache.has)
            trees.append(tree_rows(request, slots))
        return Batch(step=batch.step, trees=tuple(trees), prefills=tuple(prefills))


def _without_ancestors(answers: Answers, rows: TreeRows) -> Answers:
    """The answers to the submitted nodes alone."""
    asked = np.flatnonzero(np.isin(answers.node_ids, rows.node_ids))
    return Answers(
        request=answers.request,
        node_ids=answers.node_ids[asked],
        tokens=answers.tokens[asked],
        probs=None if answers.probs is None else answers.probs[asked],
    )
