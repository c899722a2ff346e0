"""The controller's side (rank 0) of a pipeline whose stages run in other processes (ranks).

It implements the steps of ``PipelineExecutor`` with messages. In every step, rank 0 sends the batch
to the first stage and the commits to every rank. The last rank replies with tokens, ranks with
early exits reply with candidates, and ranks whose hidden states are needed reply with these. Rank 0
and every other rank know from an ``InFlightRows`` of their own which rows have not been pruned.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec.clocks import Clock, ClockKind
from specdec.clocks.meter import Meter
from specdec.distributed.messages import Ending, Entry, Kind, Message, ReplyKey
from specdec.distributed.plan import SessionPlan
from specdec.distributed.rank_groups import GroupHandle
from specdec.distributed.shared_draft import DraftGroup
from specdec.executors.pipeline import StepCharges
from specdec.executors.stage import (
    InFlight,
    InFlightRows,
    OpenedRequest,
    with_early,
    with_hidden,
)
from specdec.interfaces import Executor
from specdec.state import RequestState
from specdec.types import Answers, Batch, Commit, Exits, Output

_NO_TOKENS = np.zeros(0, np.int64)
_EARLY = (Kind.EXITS, Kind.EARLY)  # replies that are of use before the step ends


class DistributedExecutor(Executor):
    """A pipeline whose stages run in other processes (ranks); rank 0 decodes, and runs the draft.

    Attributes:
        latency, in_flight: number of stages (steps until answers; largest number of open batches).
        counters: batches and rows that entered the first stage.
        hidden: names of the hidden states that come with the target's tokens, on the host. Ranks
            send them when they are computed; rank 0 stores them until the tokens arrive.
        early_hidden: names of the hidden states that ``poll`` or ``collect`` returns in the step in
            which they are computed.
    """

    can_poll = True
    distributed = True

    def __init__(
        self,
        *,
        plan: SessionPlan,
        clock: Clock,
        meter: Meter,
        timeout_s: float,
        draft: DraftGroup | None = None,
        group_number: int = 0,
    ) -> None:
        """Starts or joins ranks, which load their layers; ``shutdown`` releases them, and those of
        a shared ``draft``. Executors in use at the same time need different ``group_number``.

        Raises:
            RankFailure: a rank ends while it loads, or later makes no progress for ``timeout_s``.
            UserError: a rank refuses the configuration, or there are too few ranks.
        """
        self._draft = draft
        self.latency = self.in_flight = plan.num_groups
        self._plan = plan
        self._ranks = range(1, len(plan.ranks) + 1)
        self._first_ranks = [r for r in self._ranks if plan.ranks[r - 1].group == 1]
        self._last_rank = len(plan.ranks)
        self._times = StepCharges(clock, plan.devices) if clock.kind is ClockKind.PACED else None
        self._meter = meter
        self._timeout_s = timeout_s
        self._tick = self._step = -1
        self._opens, self._closes = list[OpenedRequest](), list[int]()
        self._entry = Entry(batch=Batch(step=-1))
        self._in_flight = InFlightRows()
        self._side_parts = {
            rank: part for rank, part in enumerate(plan.ranks, 1) if part.has_side_outputs
        }
        self.hidden = tuple(n for part in self._side_parts.values() for n in part.hidden)
        self.early_hidden = tuple(n for part in self._side_parts.values() for n in part.early)
        self._on_stage: dict[int, Batch] = {}  # the rows that each computes in this step
        # replies of this step that were not returned yet -> ticks of their sending
        self._expected: dict[ReplyKey, int] = {}
        self._in_step = self._is_waiting = False
        self._handle = GroupHandle(plan.num_ranks, threads=plan.threads, number=group_number)
        self._group = self._handle.group
        try:
            self._session = self._group.open_session(plan)
        except BaseException:
            self._handle.release(broken=True)
            if draft is not None:
                draft.shutdown(broken=True)
            raise

    def open(self, request: RequestState) -> None:
        sampling = request.sampling
        self._opens.append(
            OpenedRequest(
                id=request.id,
                max_cached=request.max_cached,
                sampling=sampling,
                tokens=request.tokens.copy() if sampling.needs_history else _NO_TOKENS,
            )
        )

    def submit(self, batch: Batch) -> None:
        self._begin(batch, self._first_ranks)
        if batch.num_tokens:
            self._on_stage[1] = batch
        self._expected = self._expected_replies()
        if self._times is not None:
            last = self._on_stage.get(self.in_flight)
            self._times.compute(self._num_rows(), 0 if last is None else last.num_nodes)
            for part in self._side_parts.values():
                if (at_exit := self._on_stage.get(part.group)) is not None:
                    for _ in part.exits:
                        self._times.exit(part.group - 1, at_exit.num_nodes)

    def _begin(self, batch: Batch, ranks: Sequence[int]) -> None:
        """Begins a step and sends its batch to ``ranks``."""
        self._tick += 1
        self._step = batch.step
        self._in_step = True
        self._is_waiting = False
        self.counters.count(batch)
        self._entry = Entry(closes=tuple(self._closes), opens=tuple(self._opens), batch=batch)
        for request_id in self._closes:
            self._in_flight.close(request_id)
        for opened in self._opens:
            self._in_flight.open(opened.id, self._tick)
        self._in_flight.enter(self._tick, batch)
        self._closes.clear()
        self._opens.clear()
        if not self._entry.is_empty:
            begin = Message(Kind.BEGIN, self._session, self._tick, self._entry)
            self._group.send(begin, ranks)

    def ready(self) -> bool:
        if self._times is not None and self._times.busy():
            return False
        return self._has_all()

    def due_s(self) -> float | None:
        return None if self._times is None else self._times.due_s()

    def set_wakeup(self, event: threading.Event) -> bool:
        self._group.inbox.wakeup = event
        return True

    def poll(self) -> Output | None:
        self._group.check()
        early = [k for k in self._expected if k[0] in _EARLY and self._has(k)]
        if early:
            self._is_waiting = False
            return self._read(self._replies(early))
        if not self._has_all():
            self._group.check_progress(self._timeout_s, begins=not self._is_waiting)
            self._is_waiting = True
        return None

    def collect(self, *, wait: bool = True) -> Output:
        if not self._expected:
            self._group.check()
        with self._meter.waiting():
            replies = self._replies([*self._expected])
        if self._times is not None:
            self._times.finish()
        return self._read(replies)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        sent = tuple(replace(c, hidden={}) if c.hidden else c for c in commits)
        end = Message(Kind.END, self._session, self._tick, Ending(self._entry, sent))
        self._group.send(end, reversed(self._ranks))  # the last rank's answer is needed first
        self._in_flight.commit(self._tick, commits)
        self._in_flight.drop(self._entry_tick(self.in_flight))
        later = range(2, self.in_flight + 1)
        on_stage = {stage: self._in_flight.alive(self._tick + 2 - stage) for stage in later}
        self._on_stage = {s: flight.batch for s, flight in on_stage.items() if flight is not None}
        if self._times is not None:
            pruned = sum(commit.num_examined for commit in commits)
            self._times.end(pruned, self._num_rows()[1:], answered=bool(output.answers))
        if self._draft is not None:
            self._draft.step = self._step + 1
        self._in_step = False

    def close(self, request_id: int) -> None:
        self._closes.append(request_id)

    def reports(self) -> list[dict[str, Any]]:
        return self._group.reports(self._session, self._ranks, self._timeout_s)

    def draft_reports(self) -> list[dict[str, Any]]:
        return [] if self._draft is None else self._draft.reports()

    @property
    def pids(self) -> list[int] | None:
        pids = self._group.pids
        return None if pids is None else pids[: self._handle.num_ranks]

    @property
    def bytes_sent(self) -> int:
        return self._group.connections.num_bytes

    @property
    def stage_of_rank(self) -> dict[int, int]:
        return {rank: self._plan.ranks[rank - 1].group for rank in self._ranks}

    def shutdown(self) -> None:
        if self._draft is not None:
            self._draft.shutdown(broken=self._in_step)
        if self._group.alive and not self._in_step:
            self._group.close_session(self._session)
        self._handle.release(broken=self._in_step)

    def _has(self, key: ReplyKey) -> bool:
        return self._group.has_reply(key, self._session)

    def _has_all(self) -> bool:
        return all(map(self._has, self._expected))

    def _replies(self, keys: Sequence[ReplyKey]) -> dict[ReplyKey, Any]:
        return {
            key: self._group.reply(key, self._session, self._expected.pop(key), self._timeout_s)
            for key in keys
        }

    def _num_rows(self) -> list[int]:
        stages = range(1, self.in_flight + 1)
        return [b.num_tokens if (b := self._on_stage.get(stage)) else 0 for stage in stages]

    def _entry_tick(self, stage: int) -> int:
        return self._tick + 1 - stage

    def _expected_replies(self) -> dict[ReplyKey, int]:
        expected: dict[ReplyKey, int] = {}
        last = self._on_stage.get(self.in_flight)
        for rank, part in self._side_parts.items():
            batch = self._on_stage.get(part.group)
            if part.exits and batch is not None and batch.trees:
                expected[Kind.EXITS, rank] = self._tick
            if part.early and batch is not None:
                expected[Kind.EARLY, rank] = self._tick
            if part.hidden and last is not None:
                expected[Kind.HIDDEN, rank] = self._entry_tick(self.in_flight) + part.group - 1
        if last is not None and last.trees:
            expected[Kind.ANSWERS, self._last_rank] = self._tick
        return expected

    def _read(self, replies: Mapping[ReplyKey, Any]) -> Output:
        answers: tuple[Answers, ...] = ()
        exits: tuple[Exits, ...] = ()
        last: InFlight | None = None
        output = Output(step=self._step)
        answered = self._entry_tick(self.in_flight)
        for (kind, rank), body in replies.items():
            part = self._plan.ranks[rank - 1]
            entered = answered if kind is Kind.HIDDEN else self._entry_tick(part.group)
            if kind is Kind.ANSWERS:
                answers = tuple(a for a in body if self._is_open(entered, a.request))
            elif kind is Kind.EXITS:
                exits += tuple(e for e in body if self._is_open(entered, e.request))
            else:
                names = part.early if kind is Kind.EARLY else part.hidden
                captured = dict(zip(names, body.states, strict=True))
                flight = InFlight(body.batch, body.states[0], captured)
                self._in_flight.prune(entered, flight)
                if kind is Kind.EARLY:
                    output = with_early(output, flight.batch, flight.captured)
                else:
                    last = last or flight
                    last.captured |= flight.captured
        output = replace(output, answers=answers, exits=exits)
        return output if last is None else with_hidden(output, last.batch, last.captured)

    def _is_open(self, entered: int, request_id: int) -> bool:
        # With executor=replicated, a busy copy is closed before it commits.
        return request_id not in self._closes and self._in_flight.is_open(request_id, entered)


@dataclass(slots=True)
class _Unanswered:
    """A submitted batch whose answers have not been returned yet."""

    tick: int
    missing: set[ReplyKey]
    exits_at: int = -1  # tick at which the latest of its exits arrived
    answers: tuple[Answers, ...] = ()


class FreeExecutor(DistributedExecutor):
    """A pipeline without lock step: ranks wait only for what they receive (PPSD, Algorithm 1).

    A step is one pass of the first stage: it ends when that pass and its exit head have ended, and
    returns the answers to the oldest batch if they have arrived (line 3). It ends at once if these
    answers have arrived before; a step without rows, or with ``in_flight`` unanswered batches, ends
    with the next reply. The number of steps thus depends on times (``latency`` is the number of
    stages), but the tokens do not: a batch's answers are returned in a later step than its last
    early exits, so that the policy has seen the children that all exit heads propose.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._times = None  # each rank paces itself
        exits: set[ReplyKey] = {(Kind.EXITS, rank) for rank in {1, *self._side_parts}}
        self._replies_of = {*exits, (Kind.ANSWERS, self._last_rank)}
        self._unanswered: deque[_Unanswered] = deque()

    def submit(self, batch: Batch) -> None:
        self._begin(batch, self._ranks)
        if batch.num_tokens:
            self._unanswered.append(_Unanswered(self._tick, set(self._replies_of)))

    def ready(self) -> bool:
        keys = self._waits_for()
        return not keys or any(map(self._has, keys))

    def poll(self) -> Output | None:
        self._group.check()
        exits = self._take()
        if not exits and not self.ready():
            self._group.check_progress(self._timeout_s, begins=not self._is_waiting)
            self._is_waiting = True
        return Output(step=self._step, exits=exits) if exits else None

    def collect(self, *, wait: bool = True) -> Output:
        exits = self._take()
        with self._meter.waiting():
            while keys := self._waits_for(exits):
                self._group.wait_for_reply(keys, self._session, self._timeout_s)
                exits += self._take()
        answers: tuple[Answers, ...] = ()
        while not answers and self._has_answers() and self._unanswered[0].exits_at < self._tick:
            batch = self._unanswered.popleft()
            answers = tuple(a for a in batch.answers if self._is_open(batch.tick, a.request))
            self._in_flight.drop(batch.tick)
        return Output(step=self._step, answers=answers, exits=exits)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        if commits:
            ending = Ending(Entry(batch=Batch(step=self._step)), tuple(commits))
            end = Message(Kind.END, self._session, self._tick, ending)
            self._group.send(end, reversed(self._ranks))
        self._in_flight.commit(self._tick, commits)
        if self._draft is not None:
            self._draft.step = self._step + 1
        self._in_step = False

    def _waits_for(self, exits: Sequence[Exits] = ()) -> set[ReplyKey]:
        """Returns keys of replies, any one of which ends the wait for the step's end; an empty set
        if the step can end now. ``exits`` are those that have arrived in this step.
        """
        if self._has_answers():
            return set()
        passed: ReplyKey = (Kind.EXITS, 1)  # the first stage is free again
        if self._unanswered and passed in self._unanswered[-1].missing:
            return {passed}
        idle = not (exits or self._entry.batch.num_tokens)
        alive = any(self._in_flight.alive(batch.tick) is not None for batch in self._unanswered)
        is_full = len(self._unanswered) >= self.in_flight
        return self._replies_of if (idle and alive) or is_full else set()

    def _has_answers(self) -> bool:
        return bool(self._unanswered) and not self._unanswered[0].missing

    def _take(self) -> tuple[Exits, ...]:
        """Takes the replies that have arrived; returns the exit heads' proposals among them."""
        exits: tuple[Exits, ...] = ()
        for key in self._replies_of:
            while (reply := self._group.next_reply(key, self._session)) is not None:
                tick, body = reply
                batch = next(batch for batch in self._unanswered if batch.tick == tick)
                batch.missing.discard(key)
                if key[0] is Kind.ANSWERS:
                    batch.answers = body
                    continue
                batch.exits_at = self._tick
                exits += tuple(e for e in body if self._is_open(tick, e.request))
        return exits
