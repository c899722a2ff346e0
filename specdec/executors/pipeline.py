"""The pipeline executor with all stages in one process: N stages, one batch in flight per stage.

With a simulated clock this is the simulator; the distributed executor runs the same steps
(``specdec.executors.stage``) over messages.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from specdec.clocks import CONTROLLER, Clock, ClockKind, SimulatedClock, Work
from specdec.clocks.build import check_in_process
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.exits import ExitStage
from specdec.executors.layout import PipelineOptions, PipelinePlan
from specdec.executors.models import Blocks, ModelPair, OverRanks, deliverable
from specdec.executors.stage import (
    Answerer,
    ExitReader,
    InFlight,
    InFlightRows,
    PipelineStage,
    Stage,
    with_early,
    with_hidden,
)
from specdec.interfaces import Executor
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.state import RequestState
from specdec.types import Answers, Batch, Commit, Exits, HiddenName, Needs, Output


class PipelineExecutor(Executor):
    """Runs the target as a pipeline: N stages on ranks 1 .. N, controller and draft on rank 0.

    Hidden states named in ``hidden`` move with their rows from the stage that captures them to the
    last one; those in ``early_hidden`` are returned at once. ``counters`` count rows on entry.
    """

    def __init__(
        self,
        *,
        stages: Sequence[PipelineStage],
        clock: Clock,
        hidden: tuple[HiddenName, ...] = (),
        early_hidden: tuple[HiddenName, ...] = (),
        devices: Sequence[int] | None = None,
        lock_step: bool = True,
    ) -> None:
        """Connects the stages.

        Args:
            devices: number of devices of each stage, for the clock. Default: one each.
            lock_step: if False, stages on a simulated clock wait only for their input.
        """
        self.hidden = hidden
        self.early_hidden = early_hidden
        self.stages = list(stages)
        self._in_flight = InFlightRows()
        devices = devices or [1] * len(self.stages)
        self._charges = StepCharges(clock, devices)
        if not lock_step and isinstance(clock, SimulatedClock):
            self._charges = FreeCharges(clock, devices, self._in_flight)
        self._tick = self._step = -1
        self.in_flight = len(self.stages)
        self.latency = self.in_flight

    options = PipelineOptions

    @classmethod
    def check(cls, keys: Mapping[str, Any], clock: ClockKind, *, tracing: bool) -> None:
        options = PipelineOptions(**keys)
        if options.transport == "in_process":
            check_in_process(clock, tracing=tracing)
        options.layout(default_stages=1)

    @classmethod
    def plan(cls, models: ModelPair, **options: Any) -> PipelinePlan:
        keys = PipelineOptions(**options)
        stages = keys.stages or -(-models.num_layers // models.exit_layer)
        distributed = keys.transport == "distributed"
        plan = PipelinePlan.of(models, keys.layout(stages), distributed=distributed)
        return replace(plan, lock_step=keys.lock_step)

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
        answerer = pair.answerer(draws=draws, needs_probs=needs.target_probs)
        return cls(
            stages=[
                load_stage(
                    pair,
                    (bounds[first][0], bounds[last - 1][1]),
                    needs,
                    exits=exits,
                    capture=capture,
                    meter=meter,
                    draws=draws,
                    blocks=blocks,
                    answerer=answerer if last == ends[-1] else None,
                )
                for first, last in pairwise(ends)
            ],
            clock=clock,
            hidden=needs.hidden,
            early_hidden=needs.early_hidden,
            devices=plan.layout.devices,
            lock_step=plan.lock_step,
        )

    def open(self, request: RequestState) -> None:
        self._in_flight.open(request.id, self._tick + 1)
        for stage in self.stages:
            stage.open(request)

    def submit(self, batch: Batch) -> None:
        self._step = batch.step
        self._tick += 1
        self._in_flight.enter(self._tick, batch)
        if batch.num_tokens:
            self.counters.count(batch)
        flights = self._flights()
        num_nodes = 0 if flights[-1] is None else flights[-1].batch.num_nodes
        self._charges.compute(_num_rows(flights), num_nodes)
        for i, (stage, flight) in enumerate(zip(self.stages, flights, strict=True)):
            if isinstance(stage.stage, ExitStage) and flight is not None:
                for _ in range(stage.stage.num_exits):
                    self._charges.exit(i, flight.batch.num_nodes)

    def ready(self) -> bool:
        return not self._charges.busy()

    def due_s(self) -> float | None:
        return self._charges.due_s()

    def collect(self, *, wait: bool = True) -> Output:
        output, flights = Output(step=self._step), self._flights()
        answers: tuple[Answers, ...] = ()
        exits: tuple[Exits, ...] = ()
        for stage, flight in zip(self.stages, flights, strict=True):
            if flight is None:
                continue
            out, proposed = stage.compute(flight)
            captured = out.captured
            flight.captured |= {name: captured[name] for name in self.hidden if name in captured}
            early = {name: captured[name] for name in self.early_hidden if name in captured}
            output = with_early(output, flight.batch, early)
            answers += stage.answer(flight.batch, out)
            exits += proposed
        self._charges.finish()
        output = replace(output, answers=answers, exits=exits)
        last = flights[-1]
        if last is None or not self.hidden:
            return output
        return with_hidden(output, last.batch, last.captured)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        if commits:
            for stage in self.stages:
                stage.commit(commits)
        self._in_flight.commit(self._tick, commits)
        self._in_flight.drop(self._tick + 1 - self.in_flight)
        pruned = sum(commit.num_examined for commit in commits)
        rows = _num_rows(self._flights()[:-1])
        self._charges.end(pruned, rows, answered=bool(output.answers))

    def close(self, request_id: int) -> None:
        self._in_flight.close(request_id)
        for stage in self.stages:
            stage.close(request_id)

    @property
    def stage_of_rank(self) -> dict[int, int]:
        return {rank: rank for rank in range(1, len(self.stages) + 1)}

    def _flights(self) -> list[InFlight | None]:
        """Returns each stage's batch reduced to its unpruned rows; None if there are none."""
        return [self._in_flight.alive(self._tick - i) for i in range(self.in_flight)]


def load_stage(
    pair: ModelPair,
    layers: tuple[int, int],
    needs: Needs,
    *,
    exits: Sequence[int],
    capture: Sequence[HiddenName],
    meter: Meter,
    draws: KeyedDraws,
    blocks: Blocks,
    answerer: Answerer | None,
    **shared: Any,
) -> PipelineStage:
    """Loads a half-open range of the target's layers, with those of the exit heads ``exits`` and
    hidden states ``capture`` that lie inside. ``shared``: the ``group`` of tensor-parallel ranks.
    """
    first, last = layers
    inside, reader = [layer for layer in exits if first < layer <= last], None
    if inside:
        stage: Stage = pair.exit_stage(first, last, meter, inside, **shared)
        reader = ExitReader(num_candidates=needs.exits, draws=draws, sample=needs.draft_probs)
    else:
        here = tuple(name for name in capture if first <= name.layer < last)
        stage = pair.stage(first, last, meter, capture=here, **shared)
    return PipelineStage(stage.paged(*blocks), answerer=answerer, exits=reader)


def _num_rows(flights: Sequence[InFlight | None]) -> list[int]:
    return [0 if flight is None else flight.batch.num_tokens for flight in flights]


class StepCharges:
    """Reports work to the clock (*charges* it) per stage: compute, prune, send (SpecPipe Alg. 1).

    All stages start with the step, which ends when the slowest has finished. A paced clock plans
    the other ranks' times from these charges; a measured clock ignores them. A latency profile has
    the cost of one device; the devices of a stage run one after the other (PipeDec 3.1).
    """

    def __init__(self, clock: Clock, devices: Sequence[int]) -> None:
        self._clock = clock
        self._ranks = range(1, len(devices) + 1)
        self._devices = devices

    def compute(self, rows: Sequence[int], num_nodes: int) -> None:
        self._begin()
        for rank, num_rows in zip(self._ranks, rows, strict=True):
            self._clock.charge(rank, Work.STAGE, num_rows)
            self._further(rank, self._devices[rank - 1] - 1, num_rows)
        self._clock.charge(self._ranks[-1], Work.HEAD, num_nodes)

    def _begin(self) -> None:
        for rank in self._ranks:
            self._clock.align(rank, CONTROLLER)

    def _further(self, rank: int, num_devices: int, num_rows: int) -> None:
        """Charges ``num_devices`` more devices of a stage, each for a transfer and a pass."""
        for _ in range(num_devices):
            self._clock.charge(rank, Work.TRANSFER, num_rows)
            self._clock.charge(rank, Work.STAGE, num_rows)

    def exit(self, stage: int, num_nodes: int) -> None:
        self._clock.charge(self._ranks[stage], Work.EXIT, num_nodes)

    def busy(self) -> bool:
        return any(self._clock.busy(rank) for rank in self._ranks)

    def due_s(self) -> float | None:
        ends = [self._clock.ends_s(rank) for rank in self._ranks]
        return max((at for at in ends if at is not None), default=None)

    def finish(self) -> None:
        self._clock.barrier(self._ranks)

    def end(self, pruned: int, rows: Sequence[int], *, answered: bool) -> None:
        """Charges each stage for pruning ``pruned`` nodes and for sending its ``rows`` to the next
        stage. The last stage is charged for sending answers, if there are any (``answered``).
        """
        self._begin()
        for rank, num_rows in zip(self._ranks, (*rows, int(answered)), strict=True):
            self._clock.charge(rank, Work.PRUNE, pruned)
            self._clock.charge(rank, Work.TRANSFER, num_rows)
            self._clock.align(CONTROLLER, rank)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A stage's pass over the batch of step ``tick``; its rank was idle from ``free_s`` on."""

    tick: int
    free_s: float
    start_s: float


class FreeCharges(StepCharges):
    """Charges ranks without lock step: they wait only for what they receive (PPSD Algorithm 1).

    A rank begins a batch when the rows of the stage before have arrived and its own last pass has
    ended; the controller waits for answers. A pass sends its rows before it runs its exit head
    (lines 9 to 13). The first stage looks for a verdict between two passes (line 3): a pass that
    has begun is finished, one that would begin after all of its rows were pruned never runs. The
    steps of the executor are the same as in lock step; only their times differ.
    """

    _clock: SimulatedClock

    def __init__(
        self, clock: SimulatedClock, devices: Sequence[int], in_flight: InFlightRows
    ) -> None:
        super().__init__(clock, devices)
        self._in_flight, self._tick = in_flight, -1
        self._sent_s = [0.0] * (len(devices) + 1)  # by rank: when its latest rows had left it
        self._passes: list[deque[_Pass]] = [deque(maxlen=2 * len(devices)) for _ in devices]
        self._exits: dict[int, float] = {}  # tick of entry -> when stage 1 has the exit's token

    def compute(self, rows: Sequence[int], num_nodes: int) -> None:
        clock, last = self._clock, self._ranks[-1]
        self._tick += 1
        self._sent_s[CONTROLLER] = max(clock.now(), *self._exits.values(), 0.0)
        self._exits.clear()
        self._answered = num_nodes > 0
        for rank in reversed(self._ranks):  # the stage before has not begun its next batch
            if not (num_rows := rows[rank - 1]):
                continue
            free_s = clock.ends_s(rank)
            clock.delay(rank, self._sent_s[rank - 1])
            self._passes[rank - 1].append(_Pass(self._tick + 1 - rank, free_s, clock.ends_s(rank)))
            clock.charge(rank, Work.STAGE, num_rows)
            self._further(rank, self._devices[rank - 1] - 1, num_rows)
            if rank == last:
                clock.charge(rank, Work.HEAD, num_nodes)
            clock.charge(rank, Work.TRANSFER, num_rows if rank < last else min(num_nodes, 1))
            self._sent_s[rank] = clock.ends_s(rank)

    def exit(self, stage: int, num_nodes: int) -> None:
        """Charges the clock for an exit head, and for sending its token to the first stage."""
        super().exit(stage, num_nodes)
        if stage:
            self._clock.charge(self._ranks[stage], Work.TRANSFER, 1)
        self._exits[self._tick - stage] = self._clock.ends_s(self._ranks[stage])

    def finish(self) -> None:
        """Makes the controller wait for the answers of the step, if there are any."""
        if self._answered:
            self._clock.wait_until(self._sent_s[self._ranks[-1]])

    def end(self, pruned: int, rows: Sequence[int], *, answered: bool) -> None:
        """Charges pruning, and cancels passes that have not begun and have lost all their rows."""
        clock, now = self._clock, self._clock.now() * (1 - 1e-12)  # sums of equal terms are equal
        done = self._tick + 1 - len(self._ranks)  # the latest batch that left the last stage
        for rank, passes in zip(self._ranks, self._passes, strict=True):
            while passes and passes[-1].start_s >= now:
                if passes[-1].tick <= done or self._alive(passes[-1].tick):
                    break
                dropped = passes.pop()
                clock.cancel(rank, dropped.start_s, dropped.free_s)
            if pruned:
                clock.charge(rank, Work.PRUNE, pruned)
        self._exits = {tick: at for tick, at in self._exits.items() if self._alive(tick)}

    def _alive(self, tick: int) -> bool:
        return self._in_flight.alive(tick) is not None
