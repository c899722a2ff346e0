"""Builds strategies in Python from parts and shared models.

bench = Workbench(pair, seed=0)
parts = bench.parts(
    source=DraftModelSource(runner=bench.draft_runner()),
    policy=BestFirst(bs=32, w=4, d=6),
    verifier=MatchVerifier(),
)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import cast

import numpy as np
import torch

from specdec.clocks import Clock, MeasuredClock
from specdec.clocks.build import check_in_process
from specdec.clocks.meter import Meter
from specdec.compose import refusals
from specdec.distributed.draft_leader import DraftGroup
from specdec.distributed.executor import DistributedExecutor, Ranks
from specdec.distributed.plan import DraftPlan, ExitPlan, RankPlan, SessionPlan, plan_ranks
from specdec.errors import UserError
from specdec.executors import (
    EarlyExitExecutor,
    ExitFront,
    ExitReader,
    LocalExecutor,
    PipelineExecutor,
    Stage,
)
from specdec.executors.answerer import Answerer
from specdec.executors.early_exit import Segment
from specdec.executors.exits import paged
from specdec.executors.layout import StageLayout
from specdec.executors.stage import split_layers
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.loop import decode
from specdec.models.runner import ModelRunner
from specdec.pairs import HuggingFacePair, ModelPair, PartsOnly
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.serving.rules import MakeScheduler, ServingRules
from specdec.serving.scheduler import FifoScheduler
from specdec.sources.combined import joined_needs
from specdec.state import DecodeState, RequestState
from specdec.types import Commit, Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one strategy, ready to run."""

    source: TokenSource
    policy: TreePolicy
    verifier: Verifier
    executor: Executor
    clock: Clock
    meter: Meter
    draws: KeyedDraws
    serving: ServingRules = field(default_factory=ServingRules)
    scheduler: MakeScheduler = FifoScheduler

    def new_state(self) -> DecodeState:
        """An empty decoding state with the strategy's draws, clock and meter."""
        return DecodeState(draws=self.draws, clock=self.clock, meter=self.meter)

    def decode(
        self,
        state: DecodeState,
        requests: Iterable[RequestState],
        *,
        batch_size: int = 1,
        prefill_chunk: int = 512,
        on_finish: Callable[[RequestState], None] | None = None,
    ) -> Iterator[list[Commit]]:
        """Decodes ``requests`` and yields the commits of each step.

        Every step runs in inference mode; the caller's code between steps does not.

        Args:
            state: see ``new_state``.
            requests, batch_size, prefill_chunk, on_finish: see ``FifoScheduler``.
        """
        scheduler = self.scheduler(
            requests=requests,
            parts=(self.policy, self.source, self.executor),
            batch_size=batch_size,
            prefill_chunk=prefill_chunk,
            rules=self.serving,
            on_finish=on_finish,
        )
        steps = decode(
            state=state,
            scheduler=scheduler,
            policy=self.policy,
            source=self.source,
            verifier=self.verifier,
            executor=self.executor,
        )
        return _in_inference_mode(steps)


def _in_inference_mode(steps: Iterator[list[Commit]]) -> Iterator[list[Commit]]:
    while True:
        with torch.inference_mode():
            commits = next(steps, None)
        if commits is None:
            return
        yield commits


class Workbench:
    """Models, clock and seed that the parts of strategies share.

    Attributes:
        pair, clock, meter, draws: shared by all parts.
    """

    def __init__(
        self,
        pair: ModelPair,
        *,
        seed: int = 0,
        clock: Clock | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Stores the shared objects; models are loaded on first use.

        Args:
            pair: target and draft.
            seed: of all draws.
            clock: the wall clock if omitted.
            meter: counts model passes and the clock's waits; a new one if omitted.
        """
        self.pair = pair
        self.meter = Meter() if meter is None else meter
        self.clock: Clock = MeasuredClock(meter=self.meter) if clock is None else clock
        self.draws = KeyedDraws(seed=seed)
        self._draft: DraftGroup | None = None
        self._front: ExitFront | None = None

    def draft_runner(
        self, stages: StageLayout | None = None, ranks: Ranks | None = None
    ) -> ModelRunner:
        """Runner of the draft model, for ``DraftModelSource``.

        Args:
            stages: layout; with ``ranks``, ``draft_degree`` ranks share the draft. The executor of
                ``parts``, which needs the same arguments, shuts them down.
            ranks: processes of the executor.

        Raises:
            RankFailure: a rank failed while loading.
        """
        if stages is None or ranks is None or stages.draft_degree == 1:
            return self.pair.draft_runner(self.meter)
        assert isinstance(self.pair, HuggingFacePair), "only real drafts are run"
        if self._draft is None:
            first = 1 if stages.shared else stages.num_devices + 1
            members = range(first, first + stages.draft_degree - 1)
            plan = DraftPlan(
                peers=(0, *members),
                model=ranks.model,
                clock=ranks.clock,
                threads=ranks.threads,
            )
            self._draft = DraftGroup(
                plan=plan,
                pair=self.pair,
                meter=self.meter,
                num_ranks=_num_ranks(stages, shares_draft=True),
                timeout_s=ranks.timeout_s,
            )
        return self._draft.runner

    def source_pair(self, ranks: Ranks | None = None) -> ModelPair:
        """The pair for token sources.

        Args:
            ranks: processes that run the target. The pair then loads target layers for sources
                alone, without the rest of the target.
        """
        if ranks is None or not hasattr(self.pair, "lone_part"):
            return self.pair
        return cast("ModelPair", PartsOnly(cast("HuggingFacePair", self.pair)))

    def release(self) -> None:
        """Shuts down ranks that share a draft and belong to no executor."""
        if self._draft is not None:
            self._draft.shutdown(broken=True)
            self._draft = None

    def parts(
        self,
        *,
        source: TokenSource,
        policy: TreePolicy,
        verifier: Verifier,
        stages: int | StageLayout | None = None,
        ranks: Ranks | None = None,
        serving: ServingRules | None = None,
    ) -> Parts:
        """Checks the parts of a strategy and builds its executor.

        Args:
            source, policy, verifier: the strategy.
            stages: number of stages of a pipeline, one device each, or their layout; None for the
                local executor.
            ranks: processes of the stages; None for this process alone.
            serving: how requests share the target; by default each step feeds all of them.

        Raises:
            UserError: parts that do not fit together, or more stages than layers.
            RankFailure: a rank failed while loading.
        """
        needs = joined_needs((verifier.needs, source.needs))
        serving = ServingRules() if serving is None else serving
        layout = StageLayout(stages=stages) if isinstance(stages, int) else stages
        # Check before the target is loaded and ranks start.
        serving.budget(policy, 1 if layout is None else layout.stages)
        refusals.check_choice(policy, verifier, self.clock)
        refusals.check_source(source, policy, verifier, self.pair.vocab_size)
        if layout is None or not layout.after_drafting:
            refusals.check_exits(source, policy, 1 if layout is None else layout.stages)
        parts = Parts(
            source=source,
            policy=policy,
            verifier=verifier,
            executor=self._executor(needs, layout, ranks, serving),
            clock=self.clock,
            meter=self.meter,
            draws=self.draws,
            serving=serving,
        )
        try:
            refusals.check_executor(source, policy, parts.executor)
        except UserError:
            parts.executor.shutdown()
            raise
        return parts

    def _executor(
        self,
        needs: Needs,
        stages: StageLayout | None,
        ranks: Ranks | None,
        serving: ServingRules,
    ) -> Executor:
        pair = self.pair
        blocks = serving.num_blocks, serving.block_tokens
        answerer = pair.answerer(draws=self.draws, needs_probs=needs.target_probs)
        if stages is not None and stages.after_drafting:
            return self._early_exit(stages, answerer, serving)
        hidden, early = needs.hidden, needs.early_hidden
        capture = tuple(sorted({name.layer for name in hidden + early}))
        if stages is None:
            all_layers = pair.stage(0, pair.num_layers, self.meter, capture_layers=capture)
            return LocalExecutor(
                stage=paged(all_layers, *blocks),
                answerer=answerer,
                clock=self.clock,
                hidden=hidden,
            )
        exits = (pair.exit_layer, *needs.further_exits) if needs.exits else ()
        bounds = self._bounds(stages, exits[0] if exits else None)
        if ranks is not None:
            parts = plan_ranks(
                bounds, stages.devices, stages.degree, exits=exits, hidden=hidden, early=early
            )
            return self._distributed(needs, stages, ranks, parts, serving)
        check_in_process(self.clock.kind, tracing=self.clock.timeline is not None)
        # The devices of a stage are one slice; the clock is charged for each.
        ends = [0, *np.cumsum(stages.devices).tolist()]
        slices: list[Stage] = []
        for first, last in pairwise(ends):
            layers = (bounds[first][0], bounds[last - 1][1])
            inside = [layer for layer in exits if layers[0] < layer <= layers[1]]
            here = tuple(layer for layer in capture if layers[0] <= layer < layers[1])
            slices.append(
                paged(
                    pair.exit_stage(*layers, self.meter, inside)
                    if inside
                    else pair.stage(*layers, self.meter, capture_layers=here),
                    *blocks,
                )
            )
        reader = ExitReader(num_candidates=needs.exits, draws=self.draws, sample=needs.draft_probs)
        return PipelineExecutor(
            stages=slices,
            answerer=answerer,
            clock=self.clock,
            exits=reader if exits else None,
            hidden=hidden,
            early_hidden=early,
            devices=stages.devices,
        )

    def _early_exit(
        self, stages: StageLayout, answerer: Answerer, serving: ServingRules
    ) -> EarlyExitExecutor:
        pair, blocks = self.pair, (serving.num_blocks, serving.block_tokens)
        if self._front is None:
            raise UserError(
                "executor=early_exit verifies drafts of the target's first layers: use it with"
                " source=early_exit, or choose executor=local or executor=pipeline"
            )
        if serving.num_blocks is not None:
            self._front.page(serving.num_blocks, serving.block_tokens)
        after = self._front.layers[-1]
        return EarlyExitExecutor(
            front=self._front,
            rest=paged(pair.stage(after, pair.num_layers, self.meter), *blocks),
            answerer=answerer,
            clock=self.clock,
            stages=sum(last > after for _, last in self._bounds(stages, pair.exit_layer)),
        )

    def exit_front(self, stages: StageLayout, layers: Sequence[int]) -> ExitFront:
        """The layers before the last exit with the exit heads, shared by source and executor.

        Args:
            stages: priced by the clock's profile.
            layers: number of layers before each exit.
        """
        if self._front is None:
            bounds = self._bounds(stages, self.pair.exit_layer)
            segments = [
                Segment(
                    stage=self.pair.exit_stage(start, layer, self.meter, (layer,)),
                    layer=layer,
                    stages=sum(first < layer and last > start for first, last in bounds),
                )
                for start, layer in pairwise([0, *layers])
            ]
            self._front = ExitFront(segments=segments, clock=self.clock)
        return self._front

    def _distributed(
        self,
        needs: Needs,
        stages: StageLayout,
        ranks: Ranks,
        parts: tuple[RankPlan, ...],
        serving: ServingRules,
    ) -> DistributedExecutor:
        exits = ExitPlan(candidates=needs.exits, sample=needs.draft_probs) if needs.exits else None
        plan = SessionPlan(
            ranks=parts,
            exits=exits,
            degree=stages.degree,
            num_ranks=_num_ranks(stages, shares_draft=self._draft is not None),
            model=ranks.model,
            clock=ranks.clock,
            seed=self.draws.seed,
            needs_probs=needs.target_probs,
            threads=ranks.threads,
            trace=ranks.trace,
            num_blocks=serving.num_blocks,
            block_tokens=serving.block_tokens,
        )
        draft, self._draft = self._draft, None
        return DistributedExecutor(
            plan=plan,
            clock=self.clock,
            meter=self.meter,
            timeout_s=ranks.timeout_s,
            draft=draft,
        )

    def _bounds(self, stages: StageLayout, exit_layer: int | None) -> list[tuple[int, int]]:
        """(first, last) layers of each device.

        With an exit and ceil(N / E) stages, each stage has E layers and the last one the rest
        (PPSD 4.1).
        """
        pair, num_devices = self.pair, sum(stages.devices)
        if exit_layer and num_devices == ceil(pair.num_layers / exit_layer):
            starts = range(0, pair.num_layers, exit_layer)
            return [(start, min(start + exit_layer, pair.num_layers)) for start in starts]
        head = pair.head_cost if stages.balanced else 0.0
        try:
            return split_layers(pair.num_layers, num_devices, head_layers=head)
        except ValueError as error:
            raise UserError(str(error)) from error


def _num_ranks(stages: StageLayout, *, shares_draft: bool) -> int:
    """Number of ranks besides rank 0: devices of the target, and further ones of the draft."""
    further = stages.draft_degree - 1 if shares_draft and not stages.shared else 0
    return stages.num_devices + further
