"""The pipeline executor over ranks: the controller's side.

The steps are those of ``PipelineExecutor`` over messages. A step costs rank 0 one message to the
first stage (what enters) and one to every rank (what was decided); the last rank answers with
tokens, the one with an early exit with candidates. Who holds what is followed by the same books on
both sides (``distributed.ledger``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.clocks import Clock, ClockKind
from specdec.distributed.codec import (
    Entry,
    Kind,
    OpenedRequest,
    ending_words,
    entry_words,
    message,
)
from specdec.distributed.leading import DraftGroup
from specdec.distributed.lease import Lease
from specdec.distributed.ledger import Ledger
from specdec.distributed.plan import SessionPlan
from specdec.distributed.replies import read_answers, read_exits
from specdec.executors.layout import Submitted
from specdec.executors.times import StepTimes
from specdec.metrics.meter import Meter
from specdec.types import Batch, Commit, ExecutorCounters, IntArray, Output

if TYPE_CHECKING:
    from specdec.state import RequestState

_NO_TOKENS: IntArray = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How a pipeline is laid over processes.

    Attributes:
        model, clock: sections of a resolved configuration: ranks build their own from them.
        timeout_s: a run ends with an error when no rank has moved for so long.
        threads: of torch, per rank; None shares the machine's cores among them.
        trace: whether ranks write down what they do.
    """

    model: Mapping[str, Any]
    clock: Mapping[str, Any]
    timeout_s: float = 60.0
    threads: int | None = None
    trace: bool = False


class DistributedExecutor:
    """N stages on ranks of their own; the controller and the draft are on rank 0.

    Attributes:
        latency: stages (groups of ranks, where a stage has several).
        counters: batches and rows that entered the first stage.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        plan: SessionPlan,
        clock: Clock,
        meter: Meter,
        timeout_s: float,
        draft: DraftGroup | None = None,
    ) -> None:
        """Starts or joins the ranks and has them load their layers.

        Args:
            plan: which rank does what.
            clock: rank 0's. A paced one ends no step before the profile says that it is over.
            meter: told of the time that rank 0 waits for answers.
            timeout_s: a run ends with an error when no rank has moved for so long.
            draft: ranks that share the draft; shut down with this executor.

        Raises:
            RankFailure: if a rank ends while it loads.
            UserError: what a rank refuses, or too few ranks.
        """
        self._draft = draft
        self.latency = plan.num_groups
        self._plan = plan
        self.counters = ExecutorCounters()
        self._ranks = range(1, len(plan.ranks) + 1)
        self._first = [r for r in self._ranks if plan.ranks[r - 1].group == 1]
        self._times = StepTimes(clock, self.latency) if clock.kind is ClockKind.PACED else None
        self._flow = [0] * (self.latency - 1)  # rows that go into stages 2, 3, ... in this step
        self._meter = meter
        self._timeout_s = timeout_s
        self._ledger = Ledger()
        self._submitted = Submitted()
        self._tick = -1
        self._step = -1
        self._opens: list[OpenedRequest] = []
        self._closes: list[int] = []
        self._entered = _NO_TOKENS  # the step's entry, in words
        self._due: Batch | None = None  # what the last rank answers in this step
        exits = plan.exits
        self._exit_stage = 0 if exits is None else plan.ranks[exits.rank - 1].group
        self._exiting: Batch | None = None  # what passes the exit in this step
        self._in_step = False
        self._lease = Lease(max(plan.num_ranks, len(plan.ranks)), threads=plan.threads)
        self._group = self._lease.group
        try:
            self._session = self._group.open_session(plan)
        except BaseException:
            self._lease.release(broken=True)
            if draft is not None:
                draft.shutdown(broken=True)
            raise

    def open(self, request: RequestState) -> None:
        """Notes the request; ranks hear of it with the next batch."""
        sampling = request.sampling
        self._opens.append(
            OpenedRequest(
                id=request.id,
                max_len=request.num_prompt + request.stop.max_new_tokens,
                sampling=sampling,
                tokens=request.tokens.copy() if sampling.needs_history else _NO_TOKENS,
            )
        )
        self._submitted.open(request.id)

    def submit(self, batch: Batch) -> None:
        """Sends the batch to the first stage; does not wait."""
        self._tick += 1
        self._step = batch.step
        self._in_step = True
        self.counters.count(batch)
        self._submitted.add(batch)
        entry = Entry(closes=tuple(self._closes), opens=tuple(self._opens), batch=batch)
        self._closes.clear()
        self._opens.clear()
        self._ledger.enter(self._tick, batch, [o.id for o in entry.opens], entry.closes)
        if self._exit_stage == 1:
            self._exiting = self._ledger.alive(self._tick)
        if self.latency == 1:
            self._due = self._ledger.take(self._tick)
        self._entered = entry_words(entry)
        if not entry.is_empty:
            begin = message(Kind.BEGIN, self._session, self._tick, self._entered)
            self._group.send(begin, self._first)
        if self._times is not None:
            num_nodes = 0 if self._due is None else self._due.num_nodes
            self._times.compute([batch.num_tokens, *self._flow], num_nodes)
            if self._exiting is not None:
                self._times.exit(self._exit_stage - 1, self._exiting.num_nodes)

    def ready(self) -> bool:
        """Whether ``collect`` would return at once."""
        if self._times is not None and self._times.busy():
            return False
        return all(self._group.has_reply(kind) for kind in self._owed)

    def collect(self) -> Output:
        """Waits for the last rank where it has something to answer, and for exits.

        Raises:
            RankFailure: a rank died, raised, or none moved for ``timeout_s``.
        """
        owed, is_open = self._owed, self._ledger.is_open
        replies = {}
        if owed:
            with self._meter.waiting():
                for kind in owed:
                    replies[kind] = self._group.reply(
                        kind, self._session, self._tick, self._timeout_s
                    )
        else:
            self._group.check()
        if self._times is not None:
            self._times.finish()
        answers, exits = replies.get(Kind.ANSWERS), replies.get(Kind.EXITS)
        return Output(
            step=self._step,
            answers=() if answers is None else read_answers(answers, owed[Kind.ANSWERS], is_open),
            exits=() if exits is None else read_exits(exits, owed[Kind.EXITS], is_open),
        )

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Tells every rank what was decided, which ends the step."""
        pruned = sum(self._submitted.commit(commit) for commit in commits)
        decided = ending_words(commits, pruned)
        end = message(Kind.END, self._session, self._tick, decided, self._entered)
        self._group.send(end, reversed(self._ranks))  # the last rank's answer is what all wait for
        self._ledger.commit(self._tick, commits)
        if self._exit_stage > 1:
            self._exiting = self._ledger.alive(self._tick + 2 - self._exit_stage)
        if self.latency > 1:
            self._due = self._ledger.take(self._tick + 2 - self.latency)
        if self._times is not None:
            self._flow = self._rows_in_flight()
            self._times.end(pruned, self._flow, answered=bool(output.answers))
        self._in_step = False

    def close(self, request_id: int) -> None:
        """Has ranks free the request's caches with the next batch."""
        self._closes.append(request_id)
        self._submitted.close(request_id)

    def reports(self) -> list[dict[str, Any]]:
        """What each rank, from 1 on, has done so far: clock, rows computed, bytes sent, CPU.

        Raises:
            RankFailure: if one has ended.
        """
        return self._group.reports(self._session, len(self._ranks))

    @property
    def bytes_sent(self) -> int:
        """Bytes that rank 0 has sent to all ranks since they were started."""
        return self._group.num_bytes

    @property
    def places(self) -> dict[int, int]:
        """Rank -> stage, from 1."""
        return {rank: self._plan.ranks[rank - 1].group for rank in self._ranks}

    def shutdown(self) -> None:
        """Frees the ranks' parts; ranks that nobody else uses end."""
        if self._draft is not None:
            self._draft.shutdown(broken=self._in_step)
        if self._group.alive and not self._in_step:
            self._group.close_session(self._session)
        self._lease.release(broken=self._in_step)

    def _rows_in_flight(self) -> list[int]:
        """Rows that stages 2, 3, ... have before them when the step has ended."""
        if self.latency == 1:
            return []
        entered = range(self._tick, self._tick + 2 - self.latency, -1)
        due = 0 if self._due is None else self._due.num_tokens
        flowing = [self._ledger.alive(tick) for tick in entered]
        return [*(0 if batch is None else batch.num_tokens for batch in flowing), due]

    @property
    def _owed(self) -> dict[Kind, Batch]:
        """Kinds of replies that ranks owe in this step, with the rows that they are about."""
        rows = {Kind.EXITS: self._exiting, Kind.ANSWERS: self._due}
        return {kind: batch for kind, batch in rows.items() if batch is not None and batch.trees}
