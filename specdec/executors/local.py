from __future__ import annotations

from collections.abc import Sequence

from specdec.clocks import CONTROLLER, Clock, Work
from specdec.clocks.meter import Meter
from specdec.executors.models import Blocks, ModelPair, deliverable
from specdec.executors.stage import (
    Answerer,
    InFlight,
    PipelineStage,
    Stage,
    with_early,
    with_hidden,
)
from specdec.interfaces import Executor
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.state import RequestState
from specdec.types import Batch, Commit, ExecutorPlan, HiddenName, Needs, Output, Placement


class LocalExecutor(Executor):
    """Runs the target on the draft's device; each batch is answered in the step that submits it."""

    def __init__(
        self,
        *,
        stage: Stage,
        answerer: Answerer,
        clock: Clock,
        stages: int = 1,
        hidden: tuple[HiddenName, ...] = (),
        early_hidden: tuple[HiddenName, ...] = (),
    ) -> None:
        """``stage`` is the whole target; the clock is charged for a pass of ``stages`` stages."""
        self.hidden = hidden
        self.early_hidden = early_hidden
        self.stages = [PipelineStage(stage, answerer=answerer)]
        self._clock = clock
        self._num_stages = stages
        self._batch: Batch | None = None

    @classmethod
    def plan(cls, models: ModelPair) -> ExecutorPlan:
        shared = models.shared_bytes
        placements = {
            name: Placement(ranks=(CONTROLLER,), weight_bytes=(size - shared.get(name, 0),))
            for name, size in models.weight_bytes.items()
        }
        return ExecutorPlan(latency=1, in_flight=1, placements=placements)

    @classmethod
    def build(
        cls,
        plan: ExecutorPlan,  # noqa: ARG003 - it has nothing to read from it
        needs: Needs,
        *,
        pair: ModelPair,
        clock: Clock,
        meter: Meter,
        draws: KeyedDraws,
        blocks: Blocks,
    ) -> LocalExecutor:
        needs = deliverable(needs, pair.num_layers)
        layers = pair.stage(0, pair.num_layers, meter, capture=needs.hidden + needs.early_hidden)
        answerer = pair.answerer(draws=draws, needs_probs=needs.target_probs)
        if not needs.all_answers:
            answerer.follow()
        return cls(
            stage=layers.paged(*blocks),
            answerer=answerer,
            clock=clock,
            hidden=needs.hidden,
            early_hidden=needs.early_hidden,
        )

    def open(self, request: RequestState) -> None:
        self.stages[0].open(request)

    def submit(self, batch: Batch) -> None:
        self._batch = batch
        if batch.num_tokens:
            self.counters.count(batch)

    def due_s(self) -> float | None:
        return self._clock.now()

    def collect(self, *, wait: bool = True) -> Output:
        batch = self._batch
        assert batch is not None, "submit must precede collect"
        if not batch.num_tokens:
            return Output(step=batch.step)
        self._clock.start(CONTROLLER)
        out, _ = self.stages[0].compute(InFlight(batch))
        for _ in range(self._num_stages):
            self._clock.charge(CONTROLLER, Work.STAGE, batch.num_tokens)
        answers = self.stages[0].answer(batch, out)
        self._clock.charge(CONTROLLER, Work.HEAD, batch.num_nodes)
        output = Output(step=batch.step, answers=answers)
        for names, add in ((self.hidden, with_hidden), (self.early_hidden, with_early)):
            if names:
                output = add(output, batch, {name: out.captured[name] for name in names})
        return output

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self.stages[0].commit(commits)

    def close(self, request_id: int) -> None:
        self.stages[0].close(request_id)
