"""The pipeline executor over ranks: the controller's side.

Implements the steps of ``PipelineExecutor`` with messages. Per step, rank 0 sends one message to
the first stage (the batch) and one to every rank (the commits). The last rank replies with tokens,
ranks with early exits with candidates, and ranks whose hidden states a part needs with those. Both
sides track live rows with ``InFlightRows``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.clocks import Clock, ClockKind
from specdec.clocks.meter import Meter
from specdec.distributed.draft_leader import DraftGroup
from specdec.distributed.in_flight_rows import InFlightRows
from specdec.distributed.kept_rows import Keepers
from specdec.distributed.messages import (
    Entry,
    Kind,
    OpenedRequest,
    pack_ending,
    pack_entry,
    pack_message,
)
from specdec.distributed.plan import SessionPlan
from specdec.distributed.rank_groups import GroupHandle
from specdec.distributed.replies import Reply, ReplyKey, read_answers, read_exits, read_hidden
from specdec.executors.pipeline import StepCharges
from specdec.executors.stage import InFlight, with_early, with_hidden
from specdec.interfaces import Executor
from specdec.metrics.counters import ExecutorCounters
from specdec.types import Answers, Batch, Commit, Exits, HiddenName, IntArray, Output

if TYPE_CHECKING:
    from specdec.state import RequestState

_NO_TOKENS: IntArray = np.zeros(0, np.int64)
_EARLY = (Kind.EXITS, Kind.EARLY)  # replies that are of use before the step ends


class DistributedExecutor(Executor):
    """A pipeline with each stage in its own process (rank); controller and draft are on rank 0.

    Attributes:
        latency, in_flight: number of stages.
        counters: batches and rows that entered the first stage.
        hidden: hidden states of the answers, on the host. Ranks send them in the step in which they
            are computed; rank 0 keeps them until the answers arrive.
        early_hidden: hidden states that rank 0 passes on in the step in which they are computed.
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
        """Starts or joins the ranks and makes them load their layers.

        Args:
            timeout_s: the run fails when no rank has made progress for this long.
            draft: ranks that share the draft; shut down with this executor.

        Raises:
            RankFailure: a rank ends while it loads.
            UserError: a rank refuses the configuration, or there are too few ranks.
        """
        self._draft = draft
        self.latency = self.in_flight = plan.num_groups
        self._plan = plan
        self.counters = ExecutorCounters()
        self._ranks = range(1, len(plan.ranks) + 1)
        self._first_ranks = [r for r in self._ranks if plan.ranks[r - 1].group == 1]
        self._times = StepCharges(clock, plan.devices) if clock.kind is ClockKind.PACED else None
        self._next_rows = [0] * (self.in_flight - 1)  # rows entering stages 2, 3, ... in this step
        self._meter = meter
        self._timeout_s = timeout_s
        self._in_flight = InFlightRows()
        self._tick = self._step = -1
        self._opens, self._closes = list[OpenedRequest](), list[int]()
        self._packed_entry = _NO_TOKENS
        self._due: Batch | None = None  # batch that the last rank answers in this step
        self._last_rank = len(plan.ranks)
        self._side_parts = {
            rank: part for rank, part in enumerate(plan.ranks, 1) if part.has_side_outputs
        }
        self._side_stages = sorted({part.group for part in self._side_parts.values()})
        self.hidden = tuple(n for part in self._side_parts.values() for n in part.hidden)
        self.early_hidden = tuple(n for part in self._side_parts.values() for n in part.early)
        # (stage with side outputs, tick of entry) -> rows computed there, until they are answered
        self._stage_batches: dict[tuple[int, int], Batch] = {}
        # Replies of this step -> tick at which each is sent, and its rows
        self._expected: dict[ReplyKey, tuple[int, Batch]] = {}
        self._polled: set[ReplyKey] = set()  # those of them that ``poll`` has returned
        self._in_step = self._is_waiting = False
        self._handle = GroupHandle(
            max(plan.num_ranks, len(plan.ranks)), threads=plan.threads, number=group_number
        )
        self._group = self._handle.group
        self._session, self._keepers = self._open_session()

    def _open_session(self) -> tuple[int, Keepers]:
        try:
            session = self._group.open_session(self._plan)
        except BaseException:
            self._handle.release(broken=True)
            if self._draft is not None:
                self._draft.shutdown(broken=True)
            raise
        return session, Keepers(
            group=self._group,
            session=session,
            rank=self._last_rank,
            meter=self._meter,
            timeout_s=self._timeout_s,
        )

    def open(self, request: RequestState) -> None:
        """Records the request; ranks receive it with the next batch."""
        sampling = request.sampling
        self._opens.append(
            OpenedRequest(
                id=request.id,
                max_len=request.max_cached,
                sampling=sampling,
                tokens=request.tokens.copy() if sampling.needs_history else _NO_TOKENS,
            )
        )
        self._keepers.open(request.id, sampling)

    def submit(self, batch: Batch) -> None:
        """Sends the batch to the first stage; does not wait."""
        self._tick += 1
        self._step = batch.step
        self._in_step = True
        self.counters.count(batch)
        entry = Entry(closes=tuple(self._closes), opens=tuple(self._opens), batch=batch)
        self._closes.clear()
        self._opens.clear()
        self._in_flight.enter(self._tick, batch, [o.id for o in entry.opens], entry.closes)
        if 1 in self._side_stages:
            self._record_batch(1, self._tick)
        if self.in_flight == 1:
            self._due = self._in_flight.take(self._tick)
        self._expected = self._expected_replies()
        self._polled.clear()
        self._is_waiting = False
        self._packed_entry = pack_entry(entry)
        if not entry.is_empty:
            begin = pack_message(Kind.BEGIN, self._session, self._tick, self._packed_entry)
            self._group.send(begin, self._first_ranks)
        if self._times is not None:
            num_nodes = 0 if self._due is None else self._due.num_nodes
            self._times.compute([batch.num_tokens, *self._next_rows], num_nodes)
            for part in self._side_parts.values():
                stage_batch = self._stage_batches.get((part.group, self._entry_tick(part.group)))
                if stage_batch is not None:
                    for _ in part.exits:
                        self._times.exit(part.group - 1, stage_batch.num_nodes)

    def ready(self) -> bool:
        """Returns whether ``collect`` would return at once."""
        if self._times is not None and self._times.busy():
            return False
        return all(self._group.has_reply(key) for key in self._expected.keys() - self._polled)

    def due_s(self) -> float | None:
        """Returns when the slowest stage ends on a paced clock; None on others."""
        return None if self._times is None else self._times.due_s()

    def set_wakeup(self, event: threading.Event) -> bool:
        self._group.wakeup = event
        return True

    def poll(self) -> Output | None:
        """Returns exits and early hidden states that have arrived in this step."""
        self._group.check()
        arrived = {
            key: self._group.reply(key, self._session, tick, self._timeout_s)
            for key, (tick, _) in self._expected.items()
            if key[0] in _EARLY and key not in self._polled and self._group.has_reply(key)
        }
        self._polled |= arrived.keys()
        if arrived:
            self._is_waiting = False
            return self._read(arrived)
        if not all(self._group.has_reply(key) for key in self._expected.keys() - self._polled):
            self._group.check_progress(self._timeout_s, begins=not self._is_waiting)
            self._is_waiting = True
        return None

    def collect(self, *, wait: bool = True) -> Output:
        """Waits for the step's replies: answers, exits, and hidden states of the answered rows.

        Raises:
            RankFailure: a rank died or raised, or none made progress for ``timeout_s``.
        """
        replies: dict[ReplyKey, Reply] = {}
        if self._expected:
            with self._meter.waiting():
                for key, (tick, _) in self._expected.items():
                    if key in self._polled:
                        continue
                    replies[key] = self._group.reply(key, self._session, tick, self._timeout_s)
        else:
            self._group.check()
        if self._times is not None:
            self._times.finish()
        return self._read(replies)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Sends the commits to every rank, which ends the step."""
        pruned = sum(commit.num_examined for commit in commits)
        ending = pack_ending(commits, pruned)
        end = pack_message(Kind.END, self._session, self._tick, *ending, self._packed_entry)
        self._group.send(end, reversed(self._ranks))  # the last rank's answer is needed first
        self._in_flight.commit(self._tick, commits)
        for stage in self._side_stages:
            self._stage_batches.pop((stage, self._entry_tick(self.in_flight)), None)
            if stage > 1:
                self._record_batch(stage, self._tick + 1)
        if self.in_flight > 1:
            self._due = self._in_flight.take(self._tick + 2 - self.in_flight)
        if self._times is not None:
            self._next_rows = self._rows_in_flight()
            self._times.end(pruned, self._next_rows, answered=bool(output.answers))
        if self._draft is not None:
            self._draft.step = self._step + 1
        self._in_step = False

    def close(self, request_id: int) -> None:
        """Records that the request ended; ranks free its caches with the next batch."""
        self._closes.append(request_id)
        self._keepers.close(request_id)

    def reports(self) -> list[dict[str, Any]]:
        """Returns each rank's clock report, rows computed, bytes sent and CPU seconds so far."""
        return self._group.reports(self._session, self._ranks)

    def draft_reports(self) -> list[dict[str, Any]]:
        """Like ``reports``, for the ranks that share the draft with rank 0."""
        return [] if self._draft is None else self._draft.reports()

    @property
    def pids(self) -> list[int] | None:
        """Process ids of the ranks; None if a launcher has started them, perhaps elsewhere."""
        return self._group.pids

    @property
    def bytes_sent(self) -> int:
        """Bytes that rank 0 has sent since the ranks were started."""
        return self._group.num_bytes

    @property
    def stage_of_rank(self) -> dict[int, int]:
        return {rank: self._plan.ranks[rank - 1].group for rank in self._ranks}

    def shutdown(self) -> None:
        """Frees the ranks' models and caches, and releases the ranks."""
        if self._draft is not None:
            self._draft.shutdown(broken=self._in_step)
        if self._group.alive and not self._in_step:
            self._group.close_session(self._session)
        self._handle.release(broken=self._in_step)

    def _rows_in_flight(self) -> list[int]:
        """Returns the number of rows that each of stages 2, 3, ... computes in the next step."""
        if self.in_flight == 1:
            return []
        entered = range(self._tick, self._tick + 2 - self.in_flight, -1)
        batches = [*map(self._in_flight.alive, entered), self._due]
        return [0 if batch is None else batch.num_tokens for batch in batches]

    def _entry_tick(self, stage: int) -> int:
        """Returns the tick at which the batch now on ``stage`` was submitted."""
        return self._tick + 1 - stage

    def _record_batch(self, stage: int, tick: int) -> None:
        batch = self._in_flight.alive(tick + 1 - stage)
        if batch is not None:
            self._stage_batches[stage, tick + 1 - stage] = batch

    def _expected_replies(self) -> dict[ReplyKey, tuple[int, Batch]]:
        """Maps the replies due in this step to the tick at which each is sent, and its rows.

        Hidden states are collected only when their rows are answered.
        """
        expected: dict[ReplyKey, tuple[int, Batch]] = {}
        answered = self._entry_tick(self.in_flight)
        for rank, part in self._side_parts.items():
            stage_batch = self._stage_batches.get((part.group, self._entry_tick(part.group)))
            if part.exits and stage_batch is not None and stage_batch.trees:
                expected[Kind.EXITS, rank] = self._tick, stage_batch
            if part.early and stage_batch is not None:
                expected[Kind.EARLY, rank] = self._tick, stage_batch
            if part.hidden and self._due is not None:
                sent = answered + part.group - 1
                expected[Kind.HIDDEN, rank] = sent, self._stage_batches[part.group, answered]
        if self._due is not None and self._due.trees:
            expected[Kind.ANSWERS, self._last_rank] = self._tick, self._due
        return expected

    def _read(self, replies: Mapping[ReplyKey, Reply]) -> Output:
        """Converts replies to the step's output, without requests that have been closed since."""
        answers: tuple[Answers, ...] = ()
        exits: tuple[Exits, ...] = ()
        batch: Batch | None = None
        captured: dict[HiddenName, torch.Tensor] = {}
        early: Output | None = None
        answered = self._entry_tick(self.in_flight)
        for (kind, rank), reply in replies.items():
            rows, part = self._expected[kind, rank][1], self._plan.ranks[rank - 1]
            if kind is Kind.ANSWERS:
                is_open = partial(self._is_open, answered)
                answers = read_answers(reply, rows, is_open, self._keepers.of)
            elif kind is Kind.EXITS:
                is_open = partial(self._is_open, self._entry_tick(part.group))
                exits += read_exits(reply, rows, is_open, part.exits)
            elif kind is Kind.EARLY:
                flight = _states(reply, rows, part.early)
                self._in_flight.prune(self._entry_tick(part.group), flight)
                before = Output(step=self._step) if early is None else early
                early = with_early(before, flight.batch, flight.captured)
            else:
                flight = _states(reply, rows, part.hidden)
                self._in_flight.prune(answered, flight)
                batch, captured = flight.batch, captured | flight.captured
        output = Output(step=self._step, answers=answers, exits=exits)
        if early is not None:
            output = replace(early, answers=answers, exits=exits)
        return output if batch is None else with_hidden(output, batch, captured)

    def _is_open(self, entered: int, request_id: int) -> bool:
        # With executor=replicated, a busy copy is closed before it commits.
        return request_id not in self._closes and self._in_flight.is_open(request_id, entered)


def _states(reply: Reply, rows: Batch, names: Sequence[HiddenName]) -> InFlight:
    states = read_hidden(reply, rows, names)
    return InFlight(rows, states[names[0]], states)
