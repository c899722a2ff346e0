"""One rank's part of a pipeline: what it does when a step begins and when it ends.

A step is compute, prune, transmit (SpecPipe Algorithm 1, PipeDec 3.4). What a rank computes in a
step was transmitted at the end of the step before, so all stages but the first start on it as soon
as it is there; the first waits for the controller's choice. Algorithms live in the controller: a
rank follows messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

import torch

from specdec.clocks import Timeline, WallClock, Work
from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.distributed.in_flight_rows import Ledger
from specdec.distributed.messages import Ending, Entry, OpenedRequest
from specdec.distributed.plan import RankPlan, SessionPlan
from specdec.distributed.replies import Reply, answers_reply, exits_reply, hidden_reply
from specdec.executors.answerer import Answerer
from specdec.executors.exits import ExitReader, paged
from specdec.executors.row_packing import InFlight
from specdec.executors.stage import Stage
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.tensor_parallel.collective import Collective
from specdec.types import Exits

if TYPE_CHECKING:
    from specdec.pairs import ModelPair


class Edges(Protocol):
    """How a session's rows and replies travel."""

    def send_rows(self, rows: torch.Tensor | None, num_rows: int) -> None:
        """To the next rank; None where stages compute nothing."""
        ...

    def receive_rows(self, num_rows: int) -> torch.Tensor | None:
        """Waits for the rank before; None where stages compute nothing."""
        ...

    def release_rows(self) -> None:
        """The rows received last are not needed any more."""
        ...

    def send_reply(self, tick: int, reply: Reply) -> None:
        """To rank 0."""
        ...


class StageSession:
    """Caches, the batch in hand, and the books of one rank for one strategy.

    Attributes:
        rows: rows computed so far.
        doing: what the rank is at, in words, for the diagnosis of a hang.
    """

    def __init__(
        self,
        *,
        rank: int,
        plan: RankPlan,
        is_inner: bool,
        is_last: bool,
        degree: int,
        sends: bool,
        stage: Stage,
        answerer: Answerer | None,
        exits: ExitReader | None,
        clock: WallClock,
        edges: Edges,
    ) -> None:
        """Composes a rank's part.

        Args:
            rank: as the clock knows it.
            plan: its place in the pipeline.
            is_inner: whether its rows come within the step, from a rank of its own group.
            is_last: whether it answers.
            degree: ranks that share each layer; rows come from the rank so many before.
            sends: whether there is a rank so many after, for its rows to go to.
            stage: its layers.
            answerer: on the last rank.
            exits: on a rank that has early exits.
            clock: this rank's.
            edges: where rows come from and go to.
        """
        self._rank = rank
        self._plan = plan
        self._is_inner = is_inner
        self._is_last = is_last
        self._sender = max(0, rank - degree)
        self._receiver = rank + degree if sends else 0
        self._stage = stage
        self._answerer = answerer
        self._exits = exits
        self._followers = [part for part in (stage, answerer, exits) if part is not None]
        self._clock = clock
        self._edges = edges
        self._ledger = Ledger()
        self._slot: tuple[int, InFlight] | None = None  # (tick of entry, what was computed last)
        self._answered = False
        self.rows = 0
        self.doing = "idle"

    def begin(self, tick: int, entry: Entry) -> None:
        """Stage 1: takes the step's batch and computes it."""
        self._enter(tick, entry)
        self._date(entry.batch.step)
        self._compute(tick, tick)

    def end(self, tick: int, ending: Ending) -> None:
        """Prunes, transmits, and goes on with the next step's batch where it is there already."""
        first = self._plan.group == 1
        if not first:
            self._enter(tick, ending.entry)
        commits = list(ending.commits)
        self._date(ending.entry.batch.step)
        self._ledger.commit(tick, commits)
        self.doing = f"pruning at the end of step {tick}"
        clock, rank, sender = self._clock, self._rank, self._sender
        clock.start(rank)
        clock.align(sender, rank)
        if commits:
            for part in self._followers:
                part.commit(commits)
        if self._slot is not None:
            self._ledger.prune(*self._slot)
        if commits:
            clock.charge(rank, Work.PRUNE, ending.num_pruned)
            clock.charge(sender, Work.PRUNE, ending.num_pruned)
        self._transmit()
        if not first:
            self._date(ending.entry.batch.step + 1)
            self._compute(tick + 1, tick + 2 - self._plan.group)

    def report(self) -> dict[str, object]:
        """What the clock reports, and the rows computed; plain values."""
        return {"clock": asdict(self._clock.report()), "rows": self.rows}

    def _date(self, step: int) -> None:
        """Spans from here on belong to the loop's ``step`` (which starts again with each run)."""
        if self._clock.timeline is not None:
            self._clock.timeline.step = step

    def _enter(self, tick: int, entry: Entry) -> None:
        for request_id in entry.closes:
            for part in self._followers:
                part.close(request_id)
        for opened in entry.opens:
            self._open(opened)
        self._ledger.enter(tick, entry.batch, [o.id for o in entry.opens], entry.closes)

    def _open(self, opened: OpenedRequest) -> None:
        self._stage.open(opened.id, opened.max_len)
        for reader in (self._answerer, self._exits):
            if reader is not None:
                reader.open(opened)

    def _compute(self, tick: int, entered: int) -> None:
        """Computes in step ``tick`` what came in at ``entered``."""
        batch = self._ledger.take(entered)
        self._answered = False
        if batch is None:
            return
        num_rows = batch.num_tokens
        clock, rank, sender = self._clock, self._rank, self._sender
        self.doing = f"waiting for {num_rows} rows of rank {sender} in step {tick}"
        hidden = self._edges.receive_rows(num_rows) if sender else None
        self.doing = f"computing {num_rows} rows in step {tick}"
        if self._is_inner:
            clock.align(sender, rank)  # it has sent them just now
        elif self._plan.group == 1:
            clock.start(rank)
        if self._is_inner or self._plan.group > 1:
            clock.charge(sender, Work.TRANSFER, num_rows)
            clock.follow(rank, sender)
        out = self._stage.run(batch, hidden)
        if not self._is_last:  # for the last rank nothing comes before the answer
            self._edges.release_rows()
        proposed: list[Exits] = []
        if self._exits is not None:
            for layer, logits in out.exit_logits.items():
                proposed += self._exits.read(batch, logits, layer)
        clock.charge(rank, Work.STAGE, num_rows)
        self.rows += num_rows
        for _ in out.exit_logits:
            clock.charge(rank, Work.EXIT, batch.num_nodes)
        if proposed:
            self._edges.send_reply(tick, exits_reply(proposed))
        if self._plan.hidden:
            captured = [out.captured[layer] for layer in self._plan.hidden]
            self._edges.send_reply(tick, hidden_reply(captured))
        if self._receiver:
            self._slot = (entered, InFlight(batch, out.hidden))
            if not self._plan.last_in_group:
                self._transmit()
        elif batch.trees and self._is_last:
            assert self._answerer is not None, "the last rank answers"
            answers = self._answerer.answer(batch, out.logits)
            clock.charge(rank, Work.HEAD, batch.num_nodes)
            self._edges.send_reply(tick, answers_reply(answers))
            self._answered = True
        if self._is_last:
            self._edges.release_rows()

    def _transmit(self) -> None:
        """Sends what survives to the next rank."""
        slot, self._slot = self._slot, None
        num_rows = 0 if slot is None else slot[1].batch.num_tokens
        if slot is not None and num_rows:
            self.doing = f"sending {num_rows} rows to rank {self._receiver}"
            self._edges.send_rows(slot[1].hidden, num_rows)
        elif self._answered:
            num_rows = 1
        self._clock.charge(self._rank, Work.TRANSFER, num_rows)
        self.doing = "waiting for rank 0"


def build_session(
    *,
    rank: int,
    plan: SessionPlan,
    pair: ModelPair,
    edges_of: Callable[[Stage], Edges],
    join: Callable[[Sequence[int]], Collective] | None = None,
) -> StageSession:
    """One rank's part of a plan.

    Args:
        rank: from 1.
        plan: of all ranks.
        pair: the plan's model, on this rank.
        edges_of: how the stage's rows and replies travel.
        join: connects this rank with others that share its layers, where the plan has such.
    """
    meter, mine = Meter(), plan.ranks[rank - 1]
    exits = plan.exits if mine.exits else None
    stage = _slice(pair, mine, meter, join)
    stage = paged(stage, plan.num_blocks, plan.block_tokens)
    is_last = rank == len(plan.ranks)
    draws = KeyedDraws(seed=plan.seed)
    clock = build_clock(plan.clock, meter, rank=rank, timeline=Timeline() if plan.trace else None)
    assert isinstance(clock, WallClock), "refused before ranks were started"
    return StageSession(
        rank=rank,
        plan=mine,
        is_inner=rank > plan.degree and plan.ranks[rank - plan.degree - 1].group == mine.group,
        is_last=is_last,
        degree=plan.degree,
        sends=rank + plan.degree <= len(plan.ranks),
        stage=stage,
        answerer=pair.answerer(draws=draws, needs_probs=plan.needs_probs) if is_last else None,
        exits=None
        if exits is None
        else ExitReader(num_candidates=exits.candidates, draws=draws, sample=exits.sample),
        clock=clock,
        edges=edges_of(stage),
    )


def _slice(
    pair: ModelPair,
    part: RankPlan,
    meter: Meter,
    join: Callable[[Sequence[int]], Collective] | None,
) -> Stage:
    """A rank's layers, or its share of them; with the exit heads that are this rank's."""
    from specdec.pairs import HuggingFacePair

    if part.peers and isinstance(pair, HuggingFacePair):
        assert join is not None, "ranks that share layers are connected"
        group = join(part.peers)
        if part.exits:
            return pair.exit_stage(*part.layers, meter, part.exits, group)
        return pair.stage(*part.layers, meter, group, part.hidden)
    if part.exits:
        return pair.exit_stage(*part.layers, meter, part.exits)
    return pair.stage(*part.layers, meter, capture_layers=part.hidden)
