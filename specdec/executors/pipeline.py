"""The pipeline executor with all stages in one process: N stages, one batch in flight per stage.

One step is compute, prune, transmit (SpecPipe Algorithm 1, PipeDec 3.4): every stage computes its
batch, the last stage answers, the commit prunes caches and hidden states, and the surviving rows
move to the next stage. With a simulated clock this is the simulator; the distributed executor runs
the same steps over messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.clocks import Clock, ClockKind, Work
from specdec.clocks.build import check_in_process
from specdec.errors import UserError
from specdec.executors.exits import ExitReader, ExitStage
from specdec.executors.layout import PipelineOptions, PipelinePlan
from specdec.executors.models import Blocks, ModelPair, OverRanks, deliverable
from specdec.executors.stage import Answerer, InFlight, Stage, with_early, with_hidden
from specdec.interfaces import Executor
from specdec.metrics.counters import ExecutorCounters
from specdec.types import Answers, Batch, Commit, Exits, HiddenName, Needs, Output

if TYPE_CHECKING:
    from specdec.clocks.meter import Meter
    from specdec.sampling.keyed_draws import KeyedDraws
    from specdec.state import RequestState


class PipelineExecutor(Executor):
    """Runs the target as a pipeline: N stages on ranks 1 .. N, controller and draft on rank 0.

    Attributes:
        latency, in_flight: N, the number of stages.
        counters: batches and rows that entered the first stage.
        stage_rows: rows computed per stage; pruned rows are not computed by later stages.
        hidden: hidden states that the answers contain; they move with their rows from the stage
            that captures them to the last one.
        early_hidden: hidden states that the outputs contain as soon as a stage has computed them.
    """

    def __init__(
        self,
        *,
        stages: Sequence[Stage],
        answerer: Answerer,
        clock: Clock,
        exits: ExitReader | None = None,
        hidden: tuple[HiddenName, ...] = (),
        early_hidden: tuple[HiddenName, ...] = (),
        devices: Sequence[int] | None = None,
    ) -> None:
        """``devices``: number of devices of each stage, for the clock. Default: one each."""
        self.hidden = hidden
        self.early_hidden = early_hidden
        self._exits = exits
        self._exits_at = [
            (i, stage.num_exits) for i, stage in enumerate(stages) if isinstance(stage, ExitStage)
        ]
        self._stages = list(stages)
        self._answerer = answerer
        self._charges = StepCharges(clock, devices or [1] * len(self._stages))
        self._slots: list[InFlight | None] = [None] * len(self._stages)
        self._step = -1
        self.in_flight = len(self._stages)
        self.latency = self.in_flight
        self.counters = ExecutorCounters()
        self.stage_rows = [0] * len(self._stages)

    options = PipelineOptions

    @classmethod
    def check(cls, keys: Mapping[str, Any], clock: ClockKind, *, tracing: bool) -> None:
        options = PipelineOptions(**keys)
        if options.transport == "in_process":
            check_in_process(clock, tracing=tracing)
        options.layout(default_stages=1)

    @classmethod
    def plan(cls, models: ModelPair, **options: Any) -> PipelinePlan:
        """Plans layers, devices and sizes; the keys are those of ``PipelineOptions``."""
        keys = PipelineOptions(**options)
        stages = keys.stages or -(-models.num_layers // models.exit_layer)
        return PipelinePlan.of(
            models, keys.layout(stages), distributed=keys.transport == "distributed"
        )

    @classmethod
    def build(
        cls,
        plan: PipelinePlan,
        needs: Needs,
        *,
        pair: ModelPair,
        clock: Clock,
        meter: Meter,
        draws: KeyedDraws,
        blocks: Blocks,
        over_ranks: OverRanks | None,
    ) -> Any:
        """Loads the stages, in this process or (``over_ranks``) in others."""
        exits = (pair.exit_layer, *needs.further_exits) if needs.exits else ()
        needs = deliverable(needs, pair.num_layers, exits=bool(exits))
        bounds = plan.bounds(pair, exits[0] if exits else None)
        if plan.distributed and over_ranks is not None:
            return over_ranks(plan, needs, bounds=bounds, exits=exits)
        if plan.distributed and clock.kind is not ClockKind.SIMULATED:
            raise UserError(
                "executor.transport=distributed needs to know how to run its ranks: give the"
                " workbench ranks=Ranks(model=..., clock=...), or use transport=in_process"
            )
        check_in_process(clock.kind, tracing=clock.timeline is not None)
        capture = needs.hidden + needs.early_hidden
        # The devices of a stage are one slice; the clock is charged for each.
        ends = [0, *np.cumsum(plan.layout.devices).tolist()]
        stages: list[Stage] = []
        for first, last in pairwise(ends):
            layers = (bounds[first][0], bounds[last - 1][1])
            inside = [layer for layer in exits if layers[0] < layer <= layers[1]]
            here = tuple(name for name in capture if layers[0] <= name.layer < layers[1])
            stage = (
                pair.exit_stage(*layers, meter, inside)
                if inside
                else pair.stage(*layers, meter, capture=here)
            )
            stages.append(stage.paged(*blocks))
        reader = ExitReader(num_candidates=needs.exits, draws=draws, sample=needs.draft_probs)
        return cls(
            stages=stages,
            answerer=pair.answerer(draws=draws, needs_probs=needs.target_probs),
            clock=clock,
            exits=reader if exits else None,
            hidden=needs.hidden,
            early_hidden=needs.early_hidden,
            devices=plan.layout.devices,
        )

    def open(self, request: RequestState) -> None:
        for stage in self._stages:
            stage.open(request.id, request.max_cached)
        self._answerer.open(request)
        if self._exits is not None:
            self._exits.open(request)

    def submit(self, batch: Batch) -> None:
        """Passes the batch to the first stage, and charges every stage for its batch."""
        self._step = batch.step
        if batch.num_tokens:
            self._slots[0] = InFlight(batch)
            self.counters.count(batch)
        last = self._slots[-1]
        self._charges.compute(self._rows(), 0 if last is None else last.batch.num_nodes)
        for stage, num_exits in self._exits_at:
            if (at_exit := self._slots[stage]) is not None:
                for _ in range(num_exits):
                    self._charges.exit(stage, at_exit.batch.num_nodes)

    def ready(self) -> bool:
        """Returns whether every stage has finished, judged at the controller's time."""
        return not self._charges.busy()

    def due_s(self) -> float | None:
        return self._charges.due_s()

    def collect(self, *, wait: bool = True) -> Output:
        """Runs every stage once, and answers the batch that has passed the last one."""
        answers: tuple[Answers, ...] = ()
        exits: tuple[Exits, ...] = ()
        output = Output(step=self._step)
        for i, (stage, slot) in enumerate(zip(self._stages, self._slots, strict=True)):
            if slot is None:
                continue
            self.stage_rows[i] += slot.batch.num_tokens
            out = stage.run(slot.batch, slot.hidden)
            slot.hidden = out.hidden
            if out.captured:
                captured = out.captured
                slot.captured |= {name: captured[name] for name in self.hidden if name in captured}
                here = {name: captured[name] for name in self.early_hidden if name in captured}
                output = with_early(output, slot.batch, here)
            if i == len(self._stages) - 1 and slot.batch.trees:
                answers = self._answerer.answer(slot.batch, out.logits)
            if self._exits is not None:
                for layer, logits in out.exit_logits.items():
                    exits += self._exits.read(slot.batch, logits, layer)
        self._charges.finish()
        last = self._slots[-1]
        if answers or exits:
            output = replace(output, answers=answers, exits=exits)
        if last is None or not self.hidden:
            return output
        return with_hidden(output, last.batch, last.captured)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Prunes, moves the surviving rows to the next stage, and ends the step."""
        by_request = {commit.request: commit for commit in commits}
        pruned = sum(commit.num_examined for commit in commits)
        if commits:
            for stage in self._stages:
                stage.commit(commits)
            self._answerer.commit(commits)
            if self._exits is not None:
                self._exits.commit(commits)
        self._slots[-1] = None
        for i in range(len(self._slots) - 1, 0, -1):
            slot = self._slots[i - 1]
            self._slots[i - 1] = None
            if slot is not None:
                slot.prune(by_request)
                if slot.batch.num_tokens:
                    self._slots[i] = slot
        self._charges.end(pruned, self._rows()[1:], answered=bool(output.answers))

    def close(self, request_id: int) -> None:
        for stage in self._stages:
            stage.close(request_id)
        self._answerer.close(request_id)
        if self._exits is not None:
            self._exits.close(request_id)
        for i, slot in enumerate(self._slots):
            if slot is not None:
                slot.prune({}, frozenset([request_id]))
                if not slot.batch.num_tokens:
                    self._slots[i] = None

    @property
    def stage_of_rank(self) -> dict[int, int]:
        return {rank: rank for rank in range(1, len(self._stages) + 1)}

    def _rows(self) -> list[int]:
        return [0 if slot is None else slot.batch.num_tokens for slot in self._slots]


class StepCharges:
    """Charges ranks 1 .. N for a step: compute, prune, transmit (SpecPipe Algorithm 1).

    All stages start with the step, which ends when the slowest has finished. On the wall clock of
    one process, charges of other ranks are predictions (paced) or ignored (measured).

    A profile prices one device. The devices of a stage run one after the other within a step, with
    a transfer between them (PipeDec 3.1: "nodes in group G must execute tasks sequentially").
    """

    def __init__(self, clock: Clock, devices: Sequence[int]) -> None:
        """``devices`` is the number of devices of each stage."""
        self._clock = clock
        self._ranks = range(1, len(devices) + 1)
        self._larger = [(rank, num) for rank, num in enumerate(devices, 1) if num > 1]

    def compute(self, rows: Sequence[int], num_nodes: int) -> None:
        """Charges all stages for ``rows``, and the last for an output head on ``num_nodes``."""
        clock = self._clock
        self._clock.fan_out(self._ranks)
        self._clock.charge_each(self._ranks, Work.STAGE, rows)
        for rank, num_devices in self._larger:
            for _ in range(num_devices - 1):
                clock.charge(rank, Work.TRANSFER, rows[rank - 1])
                clock.charge(rank, Work.STAGE, rows[rank - 1])
        clock.charge(self._ranks[-1], Work.HEAD, num_nodes)

    def exit(self, stage: int, num_nodes: int) -> None:
        """Charges stage number ``stage`` (from 0) for an exit head on ``num_nodes`` rows."""
        self._clock.charge(self._ranks[stage], Work.EXIT, num_nodes)

    def busy(self) -> bool:
        return any(self._clock.busy(rank) for rank in self._ranks)

    def due_s(self) -> float | None:
        ends = [self._clock.ends_s(rank) for rank in self._ranks]
        return max((at for at in ends if at is not None), default=None)

    def finish(self) -> None:
        """Makes the controller wait for the slowest stage."""
        self._clock.barrier(self._ranks)

    def end(self, pruned: int, rows: Sequence[int], *, answered: bool) -> None:
        """Charges pruning, then the transfer of hidden states and answers.

        Args:
            pruned: number of nodes that the pruning examines; 0 without a commit.
            rows: rows that each stage but the last transmits.
            answered: whether the last stage sends answers to the controller.
        """
        ranks = self._ranks
        self._clock.fan_out(ranks)
        if pruned:
            self._clock.charge_each(ranks, Work.PRUNE, [pruned] * len(ranks))
        self._clock.charge_each(ranks[: len(rows)], Work.TRANSFER, rows)
        if answered:
            self._clock.charge(ranks[-1], Work.TRANSFER, 1)
        self._clock.fan_in(ranks)
