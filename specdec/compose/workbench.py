"""Builds strategies in Python from parts and shared models; refuses parts that do not fit.

    bench = Workbench(pair, seed=0)
    parts = bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=BestFirst(bs=32, w=4, d=6),
        verifier=MatchVerifier(),
    )

An executor is planned before models are loaded or processes started, and built afterwards. A rule
that concerns only one policy or executor is in that class (``check``, ``check_clock``, ...).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specdec.clocks import Clock, MeasuredClock
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors import FirstStage, LocalExecutor, PipelineExecutor
from specdec.executors.layout import EarlyExitPlan, PipelinePlan
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.loop import decode
from specdec.models.runner import ModelRunner
from specdec.pairs import ModelPair
from specdec.parts.build import check_class
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.serving.rules import MakeScheduler, ServingRules
from specdec.serving.scheduler import FifoScheduler
from specdec.sources.combined import joined_needs
from specdec.state import DecodeState, RequestState
from specdec.types import Commit, ExecutorPlan, Lossless, Needs

if TYPE_CHECKING:
    from specdec.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Planned:
    cls: type[Executor]
    plan: ExecutorPlan

    def build(self, needs: Needs, runtime: Mapping[str, Callable[[], Any]]) -> Executor:
        """Builds the executor; ``runtime`` has a factory for each object that it may request."""
        requested = [
            parameter
            for parameter in inspect.signature(self.cls.build).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        ]
        objects = {p.name: runtime[p.name]() for p in requested if p.name in runtime}
        for parameter in requested:
            if parameter.name not in objects and parameter.default is parameter.empty:
                raise UserError(
                    f"{self.cls.__name__}.build requests {parameter.name!r}, which no run has:"
                    f" request some of {', '.join(runtime)}, or give it a default"
                )
        return self.cls.build(self.plan, needs, **objects)


def planned(cls: type[Executor], pair: ModelPair, **keys: Any) -> Planned:
    """Plans an executor, for ``Workbench.parts``.

        executor = planned(PipelineExecutor, pair, stages=8)

    The keys are those of the executor's configuration.
    """
    return Planned(cls, cls.plan(pair, **keys))


def check_choice(policy: TreePolicy, verifier: Verifier, clock: Clock) -> None:
    name, judge = type(policy).__name__, type(verifier).__name__
    policy.check_clock(clock)
    if verifier.needs.draft_probs and policy.time_dependent:
        raise UserError(
            f"{name} submits chains whose length depends on the times of passes, so with {judge}"
            " the output would depend on them too; use verifier=match, policy=pearl or policy=ssd"
        )
    if verifier.needs.draft_probs and policy.value_dependent:
        raise UserError(
            f"{name} chooses among a node's candidates by their probability, which would bias"
            f" {judge}; use verifier=match, policy=chain, or policy=static (draft_overlap=none)"
        )


def check_source(
    source: TokenSource, policy: TreePolicy, verifier: Verifier, target_vocab: int
) -> None:
    name, judge, needs = type(source).__name__, type(verifier).__name__, source.needs
    policy.check_source(source)
    if verifier.needs.draft_probs and not source.gives_probs:
        raise UserError(
            f"{judge} needs the distribution that candidates were sampled from, which {name} does"
            " not give; use verifier=match or source=draft_model"
        )
    if verifier.needs.draft_probs and needs.hidden and not policy.serial:
        raise UserError(
            f"{name} gets hidden states after {type(policy).__name__} drafts on, so with {judge}"
            " the output would depend on the executor; use verifier=match or policy=chain"
        )
    if needs.target_draws and verifier.lossless is not Lossless.TOKEN:
        raise UserError(
            f"{name} reads the target's own draws, which only verifier=match keeps lossless; use"
            " verifier=match or source.guess_draw=false"
        )
    if source.vocab_size not in (None, target_vocab):
        raise UserError(
            f"the source proposes from a vocabulary of {source.vocab_size} tokens, the target has"
            f" {target_vocab}; use a draft trained with the target's tokenizer (model.draft)"
        )


def check_executor(
    source: TokenSource, policy: TreePolicy, executor: ExecutorPlan | Executor
) -> None:
    """Refuses an executor, or its plan, that does not deliver what the source needs."""
    name, needs = type(source).__name__, source.needs
    if needs.exits and (executor.latency == 1 or not policy.follows_exits):
        why = f"{type(policy).__name__} drafts before it submits, but a token's exit comes after"
        if executor.latency == 1:
            why = f"{name} needs exits before the answers, but one stage gives both at once"
        raise UserError(
            f"{why}; use executor=early_exit, or executor=pipeline with at least 2 stages and"
            " policy=ppsd or policy=ppsd_tree"
        )
    if isinstance(executor, ExecutorPlan):  # a plan does not state its hidden states
        return
    early = {*needs.early_hidden} - {*executor.early_hidden}
    layers = sorted({missing.layer for missing in early | ({*needs.hidden} - {*executor.hidden})})
    if layers:
        raise UserError(
            f"{name} needs hidden states of target layers {layers}, which"
            f" {type(executor).__name__} does not deliver; choose another source or executor"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
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

        Every step runs in inference mode; the caller's code between steps does not. The arguments
        after ``state`` are those of ``FifoScheduler``.
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
    mode = torch.inference_mode()
    while True:
        # Entering and leaving takes up to 30 us in every step, so runs enter it once for all.
        if torch.is_inference_mode_enabled():
            commits = next(steps, None)
        else:
            with mode:
                commits = next(steps, None)
        if commits is None:
            return
        yield commits


class Workbench:
    """Models, clock and seed that the parts of strategies share."""

    def __init__(
        self,
        pair: ModelPair,
        *,
        seed: int = 0,
        clock: Clock | None = None,
        meter: Meter | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Stores the shared objects; models are loaded on first use.

        Args:
            seed: seed of all draws.
            clock: default: the wall clock.
            meter: counts model passes and the clock's waits; default: a new one.
            ranks: starts the processes of distributed executors; None: everything runs in this
                process.
        """
        self.pair = pair
        self.meter = Meter() if meter is None else meter
        self.clock: Clock = MeasuredClock(meter=self.meter) if clock is None else clock
        self.draws = KeyedDraws(seed=seed)
        self.ranks = ranks
        self._first_stage: FirstStage | None = None

    def runner(self, name: str, plan: ExecutorPlan | None = None) -> ModelRunner:
        """Returns a runner of the "draft" or "middle" model, for ``DraftModelSource``.

        Raises:
            UserError: there is no such model, or the clock's profile has no cost for it.
        """
        profile = self.clock.profile
        if name == "draft":
            return self.draft_runner(plan)
        if profile is not None and name not in profile.costs:
            raise UserError(
                f"clock.profile={profile.name} has no cost curve {name!r}, so passes of that model"
                f" would be free: add it to the profile's costs, or use clock=measured"
            )
        return self.pair.runner(name, self.meter)

    def draft_runner(self, plan: ExecutorPlan | None = None) -> ModelRunner:
        """Returns a runner of the draft model.

        If ``plan`` distributes the draft over several processes, these share it by tensor
        parallelism and end with the executor that ``parts`` builds for this plan, or with
        ``release``.

        Raises:
            RankFailure: a rank failed while loading.
        """
        if self.ranks is not None and isinstance(plan, PipelinePlan) and plan.distributed:
            place = plan.placements.get("draft")
            if place is not None and place.degree > 1:
                return self.ranks.draft_runner(plan, self.pair, self.meter)
        return self.pair.runner("draft", self.meter)

    def source_pair(self) -> ModelPair:
        """Returns the pair for token sources.

        If other processes run the target, a source that needs target layers loads these alone, and
        this process never holds the whole target.
        """
        return self.pair if self.ranks is None else self.pair.without_target()

    def make_first_stage(self, plan: EarlyExitPlan, layers: Sequence[int]) -> FirstStage:
        """Returns the target's first layers with their exit heads, shared by source and executor.

        ``layers`` has the number of layers before each exit. Only the first call builds.
        """
        if self._first_stage is None:
            self._first_stage = FirstStage.of(
                plan, layers, pair=self.pair, clock=self.clock, meter=self.meter
            )
        return self._first_stage

    def release(self) -> None:
        if self.ranks is not None:
            self.ranks.release()

    def parts(
        self,
        *,
        source: TokenSource,
        policy: TreePolicy,
        verifier: Verifier,
        executor: Planned | None = None,
        stages: int | None = None,
        serving: ServingRules | None = None,
    ) -> Parts:
        """Checks the parts of a strategy and builds its executor.

        Args:
            source, policy, verifier: the strategy.
            executor: see ``planned``; default: the local executor.
            stages: in place of ``executor``: number of stages of a pipeline with one device each.
                With ``ranks`` every device is a process.
            serving: how requests share the target; by default each step feeds all of them.

        Raises:
            UserError: parts that do not fit together, or more stages than layers.
            RankFailure: a rank failed while loading.
        """
        if executor is None:
            transport = "in_process" if self.ranks is None else "distributed"
            executor = (
                planned(LocalExecutor, self.pair)
                if stages is None
                else planned(PipelineExecutor, self.pair, stages=stages, transport=transport)
            )
        plan, serving = executor.plan, ServingRules() if serving is None else serving
        # Check before the target is loaded and ranks start.
        for part, base in (source, TokenSource), (policy, TreePolicy), (verifier, Verifier):
            check_class(type(part), base, type(part).__name__)
        serving.budget(policy, plan.in_flight)
        check_choice(policy, verifier, self.clock)
        check_source(source, policy, verifier, self.pair.vocab_size)
        if not isinstance(plan, EarlyExitPlan):  # its executor says itself what it lacks
            check_executor(source, policy, plan)
        parts = Parts(
            source=source,
            policy=policy,
            verifier=verifier,
            executor=executor.build(_needs(source, verifier), self._runtime(serving)),
            clock=self.clock,
            meter=self.meter,
            draws=self.draws,
            serving=serving,
        )
        try:
            check_executor(source, policy, parts.executor)
        except UserError:
            parts.executor.shutdown()
            raise
        return parts

    def _runtime(self, serving: ServingRules) -> dict[str, Callable[[], Any]]:
        blocks = serving.num_blocks, serving.block_tokens
        ranks, seed = self.ranks, self.draws.seed
        return {
            "pair": lambda: self.pair,
            "clock": lambda: self.clock,
            "meter": lambda: self.meter,
            "draws": lambda: self.draws,
            "blocks": lambda: blocks,
            "first_stage": lambda: self._first_stage,
            "over_ranks": lambda: (
                None
                if ranks is None
                else partial(
                    ranks.executor, seed=seed, blocks=blocks, clock=self.clock, meter=self.meter
                )
            ),
        }


def _needs(source: TokenSource, verifier: Verifier) -> Needs:
    needs = joined_needs((verifier.needs, source.needs))
    follows = verifier.lossless is Lossless.TOKEN
    return needs if follows else replace(needs, all_answers=True)
