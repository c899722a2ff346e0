"""One rank's part of a pipeline: a ``PipelineStage`` that receives rows and commits as messages.

The rows that a rank computes in a step were sent at the end of the previous step, so every stage
but the first starts on them as soon as they arrive; the first waits for the batch of rank 0.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from specdec.clocks import Timeline, WallClock, Work
from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.device import to_device
from specdec.distributed.messages import Ending, Entry, Kind, Message, States
from specdec.distributed.plan import DraftPlan, SessionPlan
from specdec.distributed.transport import (
    CPU,
    ROWS,
    Connections,
    ControlLink,
    RowReceiver,
    RowSender,
)
from specdec.executors.pipeline import load_stage
from specdec.executors.stage import InFlight, InFlightRows, Stage
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.tensor_parallel.collective import Collective
from specdec.types import Answers, Batch, Exits, IntArray

_MAX_PENDING = 16  # hidden states may be large


class StageLinks:
    def __init__(
        self,
        stage: Stage,
        *,
        connections: Connections,
        link: ControlLink,
        session: int,
        neighbours: tuple[int, int],
    ) -> None:
        """Connects to ``neighbours``: previous, next rank (0: none). ``link`` leads to rank 0."""
        self._link = link
        self._session = session
        device, self._dtype, self._width = CPU, torch.float32, 1
        if stage.layers is not None:
            runner = stage.layers.runner
            device = runner.device
            self._dtype, self._width = runner.dtype, runner.hidden_size
        before, after = neighbours
        self._sender = self._receiver = None
        connect = connections.stage_peer
        if after:
            peer, wire = connect(after, device, max_pending=_MAX_PENDING)
            self._sender = RowSender(peer, ROWS + session, wire)
        if before:
            peer, wire = connect(before, device, max_pending=_MAX_PENDING)
            self._receiver = RowReceiver(
                peer, ROWS + session, wire, width=self._width, dtype=self._dtype
            )

    def send_rows(self, rows: torch.Tensor | None, num_rows: int) -> None:
        """Sends hidden states to the next stage; if ``rows`` is None, ``num_rows`` zero rows."""
        assert self._sender is not None, "the last stage has no receiver"
        if rows is None:
            rows = torch.zeros(num_rows, self._width, dtype=self._dtype)
        self._sender.send(rows)

    def receive_rows(self, num_rows: int) -> torch.Tensor:
        assert self._receiver is not None, "the first stage has no sender"
        return self._receiver.receive(num_rows)

    def release_rows(self) -> None:
        if self._receiver is not None:
            self._receiver.release()

    def reply(self, kind: Kind, tick: int, body: Any) -> None:
        self._link.send(Message(kind, self._session, tick, body).pack())


class RankSession:
    """One rank's part of a session: a pipeline or a shared draft model that rank 0 has set up.
    ``doing`` names the rank's current operation, for the diagnosis of hangs.
    """

    def __init__(self, rank: int, plan: SessionPlan | DraftPlan) -> None:
        self._meter = Meter()
        timeline = Timeline() if plan.trace else None
        clock = build_clock(plan.clock, self._meter, rank=rank, timeline=timeline)
        assert isinstance(clock, WallClock), "other clocks start no ranks"
        self._rank, self._clock = rank, clock
        self.doing = "waiting for rank 0"
        self.rows = 0  # computed so far

    def handle(self, kind: Kind, tick: int, body: Any) -> None:
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        return {"clock": asdict(self._clock.report()), "rows": self.rows}

    def _set_step(self, step: int) -> None:
        """Sets the decode loop's step, which restarts with each run, for the next trace spans."""
        if self._clock.timeline is not None:
            self._clock.timeline.step = step


class StageSession(RankSession):
    def __init__(
        self,
        *,
        rank: int,
        plan: SessionPlan,
        pair: ModelPair,
        make_links: Callable[[Stage], StageLinks],
        join: Callable[[Sequence[int]], Collective] | None = None,
    ) -> None:
        """Loads the rank's layers. ``make_links`` connects the rank with other stages, ``join``
        with ranks that share its layers (tensor parallelism).
        """
        super().__init__(rank, plan)
        self._plan = part = plan.ranks[rank - 1]
        self._is_last = rank == len(plan.ranks)
        self._sender, self._receiver = plan.neighbours(rank)
        # Whether rows arrive within the step, from a rank of the same stage.
        self._is_inner = bool(self._sender) and plan.ranks[self._sender - 1].group == part.group
        draws, answerer = KeyedDraws(seed=plan.seed), None
        if self._is_last:
            answerer = pair.answerer(draws=draws, needs_probs=plan.needs.target_probs)
        shared = {}
        if part.peers and isinstance(pair, HuggingFacePair):
            assert join is not None, "ranks that share layers are connected"
            shared["group"] = join(part.peers)
        self._stage = load_stage(
            pair,
            part.layers,
            plan.needs,
            exits=part.exits,
            capture=part.hidden + part.early,
            meter=self._meter,
            draws=draws,
            blocks=plan.blocks,
            answerer=answerer,
            **shared,
        )
        self._links = make_links(self._stage.stage)
        self._in_flight = InFlightRows()
        self._computed: int | None = None  # tick of entry of the rows to send
        self._answered = False

    def handle(self, kind: Kind, tick: int, body: Any) -> None:
        if kind is Kind.BEGIN:
            self.begin(tick, body)
        else:
            self.end(tick, body)

    def begin(self, tick: int, entry: Entry) -> None:
        self._enter(tick, entry)
        self._set_step(entry.batch.step)
        self._compute(tick, tick)

    def end(self, tick: int, ending: Ending) -> None:
        """Ends step ``tick``: prunes and sends its rows; later stages then begin the next step."""
        first = self._plan.group == 1
        if not first:
            self._enter(tick, ending.entry)
        commits = ending.commits
        self._set_step(ending.entry.batch.step)
        self._in_flight.commit(tick, commits)
        self.doing = f"pruning at the end of step {tick}"
        clock, rank, sender = self._clock, self._rank, self._sender
        clock.start(rank)
        clock.align(sender, rank)
        computed = None if self._computed is None else self._in_flight.take(self._computed)
        if commits:
            self._stage.commit(commits)
            pruned = sum(commit.num_examined for commit in commits)
            clock.charge(rank, Work.PRUNE, pruned)
            clock.charge(sender, Work.PRUNE, pruned)
        self._transmit(computed)
        if not first:
            self._set_step(ending.entry.batch.step + 1)
            self._compute(tick + 1, tick + 2 - self._plan.group)

    def _enter(self, tick: int, entry: Entry) -> None:
        self._admit(tick, entry)
        self._in_flight.enter(tick, entry.batch)

    def _admit(self, tick: int, entry: Entry) -> None:
        for request_id in entry.closes:
            self._in_flight.close(request_id)
            self._stage.close(request_id)
        for opened in entry.opens:
            self._in_flight.open(opened.id, tick)
            self._stage.open(opened)

    def _compute(self, tick: int, entered: int) -> None:
        flight = self._in_flight.alive(entered)
        self._answered, self._computed = False, None
        if flight is None:
            return
        batch, num_rows = flight.batch, flight.batch.num_tokens
        clock, rank, sender, plan = self._clock, self._rank, self._sender, self._plan
        self.doing = f"waiting for {num_rows} rows of rank {sender} in step {tick}"
        flight.hidden = self._links.receive_rows(num_rows) if sender else None
        self.doing = f"computing {num_rows} rows in step {tick}"
        if self._is_inner:
            clock.align(sender, rank)  # the sender has just finished
        elif plan.group == 1:
            clock.start(rank)
        if self._is_inner or plan.group > 1:
            clock.charge(sender, Work.TRANSFER, num_rows)
            clock.follow(rank, sender)
        out, exits = self._stage.compute(flight)
        self.rows += num_rows
        if not self._is_last:  # the last rank answers before it posts a receive
            self._links.release_rows()
        clock.charge(rank, Work.STAGE, num_rows)
        for _ in out.exit_logits:
            clock.charge(rank, Work.EXIT, batch.num_nodes)
        if exits:
            self._links.reply(Kind.EXITS, tick, exits)
        for kind, names in ((Kind.HIDDEN, plan.hidden), (Kind.EARLY, plan.early)):
            if names:
                states = States(batch, [out.captured[name] for name in names])
                self._links.reply(kind, tick, states)
        if self._receiver:
            self._computed = entered
            if not plan.last_in_group:
                self._transmit(self._in_flight.take(entered))
        else:
            self._in_flight.drop(entered)
        if answers := self._stage.answer(batch, out):
            clock.charge(rank, Work.HEAD, batch.num_nodes)
            self._links.reply(Kind.ANSWERS, tick, answers)
            self._answered = True
        if self._is_last:
            self._links.release_rows()

    def _transmit(self, flight: InFlight | None) -> None:
        self._computed = None
        num_rows = 0 if flight is None else flight.batch.num_tokens
        if flight is not None:
            self.doing = f"sending {num_rows} rows to rank {self._receiver}"
            self._links.send_rows(flight.hidden, num_rows)
        elif self._answered:
            num_rows = 1
        self._clock.charge(self._rank, Work.TRANSFER, num_rows)
        self.doing = "waiting for rank 0"


class FreeStageSession(StageSession):
    """A rank that waits only for the rows that it receives (PPSD, Algorithm 1).

    A batch keeps its number of rows on its way through the ranks, so that the next rank need not
    know which commits this rank has read: pruned rows are sent as zeros, and a rank skips the pass
    of a batch that has no other rows. Rows are sent before the time of the exit heads is charged to
    the clock (lines 9 to 13), although the heads are computed in the pass.
    """

    def __init__(self, *, take: Callable[[], Message | None], **given: Any) -> None:
        """``take`` returns the session's next message or None; ``given`` goes to the base class."""
        super().__init__(**given)
        self._take = take
        self._batches: deque[tuple[int, Batch]] = deque()  # tick of entry, and the batch

    def handle(self, kind: Kind, tick: int, body: Any) -> None:
        self._read(kind, tick, body)
        while self._batches:
            self._pass_on(*self._batches.popleft())

    def _read(self, kind: Kind, tick: int, body: Any) -> None:
        if kind is Kind.BEGIN:
            self._admit(tick, body)
            if body.batch.num_tokens:
                self._batches.append((tick, body.batch))
        else:
            self._in_flight.commit(tick, body.commits)
            self._clock.start(self._rank)
            self._stage.commit(body.commits)
            self._clock.charge(self._rank, Work.PRUNE, sum(c.num_examined for c in body.commits))

    def _pass_on(self, tick: int, batch: Batch) -> None:
        clock, rank, num_rows = self._clock, self._rank, batch.num_tokens
        hidden = None
        if self._sender:
            self.doing = f"waiting for {num_rows} rows of rank {self._sender} in step {tick}"
            hidden = self._links.receive_rows(num_rows)
        clock.start(rank)
        while (message := self._take()) is not None:
            self._read(message.kind, message.tick, message.body)
        flight = InFlight(batch, hidden)
        index = self._in_flight.prune(tick, flight)
        self.doing = f"computing {len(index)} rows in step {tick}"
        self._set_step(batch.step)
        exits: tuple[Exits, ...] = ()
        answers: tuple[Answers, ...] = ()
        num_nodes, heads = flight.batch.num_nodes, 0
        if len(index):
            out, exits = self._stage.compute(flight)
            answers, heads = self._stage.answer(flight.batch, out), len(out.exit_logits)
            self.rows += len(index)
            clock.charge(rank, Work.STAGE, len(index))
        if self._is_last:
            clock.charge(rank, Work.HEAD, num_nodes)
            clock.charge(rank, Work.TRANSFER, min(num_nodes, 1))
            self._links.reply(Kind.ANSWERS, tick, answers)
        self._links.release_rows()
        if self._receiver:
            clock.charge(rank, Work.TRANSFER, len(index))
            self.doing = f"sending {num_rows} rows to rank {self._receiver}"
            self._links.send_rows(_spread(flight.hidden, index, num_rows), num_rows)
        for _ in range(heads):
            clock.charge(rank, Work.EXIT, num_nodes)
            if self._plan.group > 1:  # the token goes to the first stage
                clock.charge(rank, Work.TRANSFER, 1)
        if self._plan.exits or rank == 1:
            self._links.reply(Kind.EXITS, tick, exits)
        self.doing = "waiting for rank 0"


def _spread(rows: torch.Tensor | None, index: IntArray, num_rows: int) -> torch.Tensor | None:
    """Returns [num_rows, hidden size]: ``rows`` at ``index``, zeros elsewhere; None if no rows."""
    if rows is None or not len(index):
        return None
    if len(index) == num_rows:
        return rows
    spread = rows.new_zeros(num_rows, rows.shape[1])
    spread[to_device(index, rows.device)] = rows
    return spread
