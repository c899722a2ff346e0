"""One rank's part of a pipeline session: computing, pruning and sending rows in each step.

A step is compute, prune, transmit (SpecPipe Algorithm 1, PipeDec 3.4). The rows that a rank
computes in a step were sent at the end of the previous step, so every stage but the first starts
on them as soon as they arrive; the first waits for the controller's batch. All decisions are made
by the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

import torch

from specdec.clocks import Timeline, WallClock, Work
from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.distributed.in_flight_rows import InFlightRows
from specdec.distributed.kept_rows import KeptRows
from specdec.distributed.messages import Ending, Entry, Kind, OpenedRequest
from specdec.distributed.plan import RankPlan, SessionPlan
from specdec.distributed.replies import Reply, answers_reply, exits_reply, hidden_reply
from specdec.executors.exits import ExitReader
from specdec.executors.stage import Answerer, InFlight, Stage
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.tensor_parallel.collective import Collective
from specdec.types import Exits, IntArray

if TYPE_CHECKING:
    from specdec.pairs import ModelPair


class StageLinks(Protocol):
    """A rank's connections within a session: to the stages before and after, and to rank 0."""

    def send_rows(self, rows: torch.Tensor | None, num_rows: int) -> None:
        """Sends hidden states to the next stage; None for stages without a model."""
        ...

    def receive_rows(self, num_rows: int) -> torch.Tensor | None:
        """Waits for the previous stage's hidden states; None for stages without a model."""
        ...

    def release_rows(self) -> None:
        """Allows the buffer of the last received rows to be reused."""
        ...

    def send_reply(self, tick: int, reply: Reply) -> None:
        """Sends a reply to rank 0."""
        ...


class StageSession:
    """State of one rank in a session: caches, in-flight rows and the batch being computed.

    Attributes:
        rows: number of rows computed so far.
        doing: current operation, as text for the diagnosis of hangs.
    """

    def __init__(
        self,
        *,
        rank: int,
        plan: SessionPlan,
        stage: Stage,
        answerer: Answerer | None,
        exits: ExitReader | None,
        kept: KeptRows | None,
        clock: WallClock,
        links: StageLinks,
    ) -> None:
        """Only the last rank has an ``answerer`` and, if a part needs distributions, ``kept``."""
        part, previous = plan.ranks[rank - 1], rank - plan.degree
        self._rank = rank
        self._plan = part
        # Whether rows arrive within the step, from a rank of the same stage.
        self._is_inner = previous > 0 and plan.ranks[previous - 1].group == part.group
        self._is_last = rank == len(plan.ranks)
        self._sender = max(0, previous)
        self._receiver = rank + plan.degree if rank + plan.degree <= len(plan.ranks) else 0
        self._stage = stage
        self._answerer = answerer
        self._exits = exits
        self._kept = kept
        self._parts = [item for item in (stage, answerer, exits, kept) if item is not None]
        self._clock = clock
        self._links = links
        self._in_flight = InFlightRows()
        self._computed: tuple[int, InFlight] | None = None  # tick of entry, rows to send
        self._answered = False
        self.rows = 0
        self.doing = "idle"

    def begin(self, tick: int, entry: Entry) -> None:
        """Computes the step's batch; called on the first stage only."""
        self._enter(tick, entry)
        self._set_step(entry.batch.step)
        self._compute(tick, tick)

    def end(self, tick: int, ending: Ending) -> None:
        """Prunes and sends rows; later stages then compute their batch of the next step."""
        first = self._plan.group == 1
        if not first:
            self._enter(tick, ending.entry)
        commits = list(ending.commits)
        self._set_step(ending.entry.batch.step)
        self._in_flight.commit(tick, commits)
        self.doing = f"pruning at the end of step {tick}"
        clock, rank, sender = self._clock, self._rank, self._sender
        clock.start(rank)
        clock.align(sender, rank)
        if commits:
            for part in self._parts:
                part.commit(commits)
        if self._computed is not None:
            self._in_flight.prune(*self._computed)
        if commits:
            clock.charge(rank, Work.PRUNE, ending.num_pruned)
            clock.charge(sender, Work.PRUNE, ending.num_pruned)
        self._transmit()
        if not first:
            self._set_step(ending.entry.batch.step + 1)
            self._compute(tick + 1, tick + 2 - self._plan.group)

    def query(self, number: int, packed: IntArray) -> None:
        """Answers query ``number`` about kept distributions; called on the last rank only."""
        assert self._kept is not None, "only the last rank keeps distributions"
        self._links.send_reply(number, self._kept.answer(packed))

    def report(self) -> dict[str, object]:
        return {"clock": asdict(self._clock.report()), "rows": self.rows}

    def _set_step(self, step: int) -> None:
        """Sets the loop's step (which restarts with each run) for the spans that follow."""
        if self._clock.timeline is not None:
            self._clock.timeline.step = step

    def _enter(self, tick: int, entry: Entry) -> None:
        for request_id in entry.closes:
            for part in self._parts:
                part.close(request_id)
        for opened in entry.opens:
            self._open(opened)
        self._in_flight.enter(tick, entry.batch, [o.id for o in entry.opens], entry.closes)

    def _open(self, opened: OpenedRequest) -> None:
        self._stage.open(opened.id, opened.max_len)
        for reader in (self._answerer, self._exits, self._kept):
            if reader is not None:
                reader.open(opened)

    def _compute(self, tick: int, entered: int) -> None:
        """Computes in step ``tick`` the batch that was submitted in step ``entered``."""
        batch = self._in_flight.take(entered)
        self._answered = False
        if batch is None:
            return
        num_rows = batch.num_tokens
        clock, rank, sender = self._clock, self._rank, self._sender
        self.doing = f"waiting for {num_rows} rows of rank {sender} in step {tick}"
        hidden = self._links.receive_rows(num_rows) if sender else None
        self.doing = f"computing {num_rows} rows in step {tick}"
        if self._is_inner:
            clock.align(sender, rank)  # the sender has just finished
        elif self._plan.group == 1:
            clock.start(rank)
        if self._is_inner or self._plan.group > 1:
            clock.charge(sender, Work.TRANSFER, num_rows)
            clock.follow(rank, sender)
        out = self._stage.run(batch, hidden)
        if not self._is_last:  # the last rank answers before it posts a receive
            self._links.release_rows()
        proposed: list[Exits] = []
        if self._exits is not None:
            for layer, logits in out.exit_logits.items():
                proposed += self._exits.read(batch, logits, layer)
        clock.charge(rank, Work.STAGE, num_rows)
        self.rows += num_rows
        for _ in out.exit_logits:
            clock.charge(rank, Work.EXIT, batch.num_nodes)
        if proposed:
            self._links.send_reply(tick, exits_reply(proposed))
        if self._plan.hidden:
            states = [out.captured[name] for name in self._plan.hidden]
            self._links.send_reply(tick, hidden_reply(Kind.HIDDEN, states))
        if self._plan.early:
            states = [out.captured[name] for name in self._plan.early]
            self._links.send_reply(tick, hidden_reply(Kind.EARLY, states))
        if self._receiver:
            self._computed = (entered, InFlight(batch, out.hidden))
            if not self._plan.last_in_group:
                self._transmit()
        elif batch.trees and self._is_last:
            assert self._answerer is not None, "the last rank answers"
            answers, kept = self._answerer.answer(batch, out.logits), None
            if self._kept is not None and out.logits is not None:
                answers, kept = self._kept.keep(batch, answers, out.logits)
            clock.charge(rank, Work.HEAD, batch.num_nodes)
            self._links.send_reply(tick, answers_reply(answers, kept))
            self._answered = True
        if self._is_last:
            self._links.release_rows()

    def _transmit(self) -> None:
        computed, self._computed = self._computed, None
        num_rows = 0 if computed is None else computed[1].batch.num_tokens
        if computed is not None and num_rows:
            self.doing = f"sending {num_rows} rows to rank {self._receiver}"
            self._links.send_rows(computed[1].hidden, num_rows)
        elif self._answered:
            num_rows = 1
        self._clock.charge(self._rank, Work.TRANSFER, num_rows)
        self.doing = "waiting for rank 0"


def build_session(
    *,
    rank: int,
    plan: SessionPlan,
    pair: ModelPair,
    make_links: Callable[[Stage], StageLinks],
    join: Callable[[Sequence[int]], Collective] | None = None,
) -> StageSession:
    """Builds one rank's part of a session.

    ``make_links`` connects the stage with other ranks; ``join`` connects ranks that share layers.
    """
    meter, part = Meter(), plan.ranks[rank - 1]
    stage = _load_stage(pair, part, meter, join).paged(plan.num_blocks, plan.block_tokens)
    draws = KeyedDraws(seed=plan.seed)
    answerer = exits = kept = None
    if rank == len(plan.ranks):
        answerer = pair.answerer(draws=draws, needs_probs=plan.needs_probs)
        if plan.needs_probs:
            kept = KeptRows()
    if part.exits and plan.exits is not None:
        num, sample = plan.exits.candidates, plan.exits.sample
        exits = ExitReader(num_candidates=num, draws=draws, sample=sample)
    clock = build_clock(plan.clock, meter, rank=rank, timeline=Timeline() if plan.trace else None)
    assert isinstance(clock, WallClock), "other clocks start no ranks"
    return StageSession(
        rank=rank,
        plan=plan,
        stage=stage,
        answerer=answerer,
        exits=exits,
        kept=kept,
        clock=clock,
        links=make_links(stage),
    )


def _load_stage(
    pair: ModelPair,
    part: RankPlan,
    meter: Meter,
    join: Callable[[Sequence[int]], Collective] | None,
) -> Stage:
    from specdec.pairs import HuggingFacePair

    if part.peers and isinstance(pair, HuggingFacePair):
        assert join is not None, "ranks that share layers are connected"
        group = join(part.peers)
        if part.exits:
            return pair.exit_stage(*part.layers, meter, part.exits, group)
        return pair.stage(*part.layers, meter, group, part.captured)
    if part.exits:
        return pair.exit_stage(*part.layers, meter, part.exits)
    return pair.stage(*part.layers, meter, capture=part.captured)
