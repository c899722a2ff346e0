"""Builds strategies in Python from parts and shared models; refuses parts that do not fit.

    bench = Workbench(pair, seed=0)
    source = DraftModelSource(runner=bench.draft_runner())
    parts = bench.parts(source=source, policy=BestFirst(bs=32, w=4), verifier=MatchVerifier())

An executor is planned before models are loaded or processes started, and built afterwards. A rule
that concerns only one policy or executor is in that class (``check``, ``check_clock``, ...).

In a configuration a part is a node ``{"_target_": "package.Class", key: value, ...}`` of
constructor arguments; those that no configuration can state are passed by name
(``Workbench.objects``).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from specdec.clocks import Clock, ClockKind, MeasuredClock, Timeline, WallClock
from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.compose.borders import guard, is_outside
from specdec.config.hydra import compose_config
from specdec.config.job import check_config, nodes_of
from specdec.config.options import PARTS, Node
from specdec.errors import UserError
from specdec.executors import FirstStage, LocalExecutor, PipelineExecutor
from specdec.executors.layout import EarlyExitPlan, PipelinePlan
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.loop import decode
from specdec.models.runner import ModelRunner
from specdec.pairs import ModelPair, build_pair
from specdec.parts.build import build_part, check_class, locate
from specdec.parts.fields import did_you_mean
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.serving.rules import MakeScheduler, ServingRules, outside_scheduler
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
        parameters = inspect.signature(self.cls.build).parameters.values()
        requested = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        for name in requested.keys() - runtime.keys():
            if requested[name] is inspect.Parameter.empty:
                raise UserError(
                    f"{self.cls.__name__}.build requests {name!r}, which no run has: request some"
                    f" of {', '.join(runtime)}, or give it a default"
                )
        objects = {name: make() for name, make in runtime.items() if name in requested}
        return self.cls.build(self.plan, needs, **objects)


def planned(cls: type[Executor], pair: ModelPair, **keys: Any) -> Planned:
    """Plans an executor of class ``cls`` for ``Workbench.parts``; ``keys`` configure it."""
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
    name, needs = type(source).__name__, source.needs
    if needs.exits and (executor.latency == 1 or not policy.follows_exits):
        why = f"{type(policy).__name__} drafts before it submits, but exits come after"
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
    label: str = "this strategy"  # for errors

    def new_state(self) -> DecodeState:
        return DecodeState(
            draws=self.draws,
            clock=self.clock,
            meter=self.meter,
            first_alone=self.serving.first_alone,
            label=self.label,
        )

    def decode(
        self,
        state: DecodeState,
        requests: Iterable[RequestState],
        *,
        batch_size: int = 1,
        prefill_chunk: int = 512,
        on_finish: Callable[[RequestState], None] | None = None,
    ) -> Iterator[list[Commit]]:
        """Decodes ``requests``, at most ``batch_size`` at a time, and yields each step's commits.
        ``prefill_chunk``: maximum prompt tokens per step; ``on_finish`` gets finished requests.
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
        while True:
            with torch.inference_mode():
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
        """Models are loaded on first use. The default clock is the wall clock; ``ranks`` starts the
        processes of distributed executors.
        """
        self.pair = pair
        self.meter = Meter() if meter is None else meter
        self.clock: Clock = MeasuredClock(meter=self.meter) if clock is None else clock
        self.draws = KeyedDraws(seed=seed)
        self.ranks = ranks
        self._first_stage: FirstStage | None = None

    def runner(self, name: str, plan: ExecutorPlan | None = None) -> ModelRunner:
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
        parallelism; they end with the executor that ``parts`` builds for this plan, or with
        ``ranks.release``. Raises RankFailure if a rank fails while it loads.
        """
        if self.ranks is not None and isinstance(plan, PipelinePlan) and plan.distributed:
            place = plan.placements.get("draft")
            if place is not None and place.degree > 1:
                return self.ranks.draft_runner(plan, self.pair, self.meter)
        return self.pair.runner("draft", self.meter)

    def make_first_stage(self, plan: EarlyExitPlan, layers: Sequence[int]) -> FirstStage:
        """Returns the target's first layers with their exit heads, shared by source and executor.

        ``layers`` has the number of layers before each exit. Later calls return the same object.
        """
        if self._first_stage is None:
            self._first_stage = FirstStage.of(
                plan, layers, pair=self.pair, clock=self.clock, meter=self.meter
            )
        return self._first_stage

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
            executor: a result of ``planned``. Default: the local executor.
            stages: instead of ``executor``, the number of stages of a pipeline: one device each,
                and one process each if the workbench has ``ranks``.
            serving: how requests share the target. Default: a step may have nodes of all requests.
        """
        if executor is None and stages is None:
            executor = planned(LocalExecutor, self.pair)
        elif executor is None:
            transport = "in_process" if self.ranks is None else "distributed"
            executor = planned(PipelineExecutor, self.pair, stages=stages, transport=transport)
        plan, serving = executor.plan, serving or ServingRules()
        # Check before the target is loaded and ranks start.
        for part, base in (source, TokenSource), (policy, TreePolicy), (verifier, Verifier):
            check_class(type(part), base, type(part).__name__)
        serving.budget(policy, plan.in_flight)
        check_choice(policy, verifier, self.clock)
        check_source(source, policy, verifier, self.pair.vocab_size)
        if not isinstance(plan, EarlyExitPlan):  # its executor says itself what it lacks
            check_executor(source, policy, plan)
        needs = joined_needs((verifier.needs, source.needs))
        if verifier.lossless is not Lossless.TOKEN:
            needs = replace(needs, all_answers=True)
        parts = Parts(
            source=source,
            policy=policy,
            verifier=verifier,
            executor=executor.build(needs, self.objects("executor", plan, verifier, serving)),
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

    def objects(
        self, kind: str, plan: ExecutorPlan, verifier: Verifier, serving: ServingRules
    ) -> Mapping[str, Callable[[], Any]]:
        """Returns name -> factory of the objects that policies, sources or executors may request.

        The constructor of a policy or source requests an object by an argument of its name, an
        executor by an argument of ``build``. The parts are made in this order: plan of the
        executor, verifier, policy, source, executor.

        Policies:
            latency: steps from submission to answer; None if answers arrive at any time.
            in_flight: number of batches that the target works on at the same time.
            profile: latency profile of the clock; None on a measured clock.
        Sources and executors:
            pair: the models.
            clock, meter: the clock is charged for work, the meter times model calls.
            draws: ``KeyedDraws`` of the run's seed.
        Sources:
            runner: name of a model (draft, middle) -> its ``ModelRunner``.
            vocab_size: the target's vocabulary size.
            sample: whether candidates are sampled, for verifiers that need their distribution.
            make_first_stage: builds the target's first layers with exit heads (``FirstStage``),
                given the number of layers before each exit; None where the executor returns exits.
            free_rank: a clock rank that no device of the executor uses; each call returns another
                one.
        Executors:
            blocks: number of blocks of each stage's paged cache (None: not paged), and tokens per
                block.
            first_stage: the ``FirstStage`` that the source has built; None if it built none.
            over_ranks: runs the stages of a pipeline on processes
                (``specdec.executors.models.OverRanks``); None where everything runs in this one.
        """
        clock, meter, draws, ranks = self.clock, self.meter, self.draws, self.ranks
        blocks, free_ranks = (serving.num_blocks, serving.block_tokens), count(plan.num_ranks + 1)
        shared: dict[str, Any] = {"blocks": blocks, "clock": clock, "meter": meter}
        of_run = {"clock": lambda: clock, "meter": lambda: meter, "draws": lambda: draws}
        if kind == "policy":
            return {
                "latency": lambda: plan.latency,
                "in_flight": lambda: plan.in_flight,
                "profile": lambda: clock.profile,
            }
        if kind == "source":
            exits = plan if isinstance(plan, EarlyExitPlan) else None
            return {
                # Where ranks run the target, a source loads only the layers that it runs itself.
                "pair": self.pair.without_target if ranks else lambda: self.pair,
                "runner": lambda: partial(self.runner, plan=plan),
                **of_run,
                "vocab_size": lambda: self.pair.vocab_size,
                "sample": lambda: verifier.needs.draft_probs,
                "make_first_stage": lambda: exits and partial(self.make_first_stage, exits),
                "free_rank": lambda: next(free_ranks),
            }
        return {
            "pair": lambda: self.pair,
            **of_run,
            "blocks": lambda: blocks,
            "first_stage": lambda: self._first_stage,
            "over_ranks": lambda: ranks and partial(ranks.executor, seed=draws.seed, **shared),
        }


def compose(cfg: Mapping[str, Any], pair: ModelPair) -> Parts:
    """Builds and checks the parts of a resolved plain configuration (``conf/config.yaml``)."""
    meter, timeline = Meter(), Timeline() if cfg.get("trace") else None
    clock = build_clock(cfg["clock"], meter, timeline=timeline)
    ranks = _ranks(cfg, pair, clock)
    bench = Workbench(pair, seed=int(cfg["seed"]), clock=clock, meter=meter, ranks=ranks)
    return build_parts(cfg, bench)


def build_parts(
    cfg: Mapping[str, Any], bench: Workbench, *, verifier: Verifier | None = None
) -> Parts:
    """Builds the parts of a configuration with clock, seed and models of a workbench; ``verifier``,
    if given, replaces the configuration's verifier.
    """
    with _in_words(cfg):
        policy, judge, executor, serving = _chosen(cfg, bench, verifier)
        source = bench.pair.fitted_source(cfg["source"], cfg["policy"])
        objects = bench.objects("source", executor.plan, judge, serving)
        try:
            drafts = build_part(source, objects, "source", TokenSource)
            parts = bench.parts(
                source=drafts, policy=policy, verifier=judge, executor=executor, serving=serving
            )
        finally:
            if bench.ranks is not None:
                bench.ranks.release()
    labels = {k: f"{k}={cfg.get('choices', {}).get(k, cfg[k]['_target_'])}" for k in PARTS}
    for kind, chosen in labels.items():
        if is_outside(cfg[kind]) and not (kind == "verifier" and verifier):
            label = f"{chosen} (class {cfg[kind]['_target_']})"
            guard(getattr(parts, kind), label, bench.pair.vocab_size)
    scheduler = outside_scheduler(cfg.get("serving", {})) or FifoScheduler
    return replace(parts, scheduler=scheduler, label=" ".join(labels.values()))


def check_parts(cfg: Mapping[str, Any], pair: ModelPair) -> None:
    """Raises ``UserError`` if parts do not fit together, so far as no models have to be loaded."""
    with _in_words(cfg):
        bench = Workbench(pair, clock=build_clock(cfg["clock"], Meter()))
        policy, judge, executor, serving = _chosen(cfg, bench, None)
        objects = bench.objects("source", executor.plan, judge, serving)
        for node in nodes_of(cfg["source"]):
            if "_target_" in node and not is_outside(node) and not _runs_models(node):
                source = build_part(node, objects, "source", TokenSource)
                if node is cfg["source"]:
                    check_source(source, policy, judge, pair.vocab_size)


def _runs_models(node: Node) -> bool:
    classes = [locate(n["_target_"], "source") for n in nodes_of(node) if "_target_" in n]
    return any({"pair", "runner"} & inspect.signature(cls).parameters.keys() for cls in classes)


@contextmanager
def _in_words(cfg: Mapping[str, Any]) -> Iterator[None]:
    """Replaces class names in errors of the block by the options that chose the classes."""
    try:
        yield
    except UserError as error:
        text, choices = str(error), cfg.get("choices", {})
        for group in choices.keys() & _SECTIONS:
            if name := str(cfg[group].get("_target_", "")).rpartition(".")[2]:
                text = re.sub(rf"(?<![.\w(]){name}\b", f"{group}={choices[group]}", text)
        raise type(error)(text) from error


def _chosen(
    cfg: Mapping[str, Any], bench: Workbench, verifier: Verifier | None
) -> tuple[TreePolicy, Verifier, Planned, ServingRules]:
    """Builds and checks the parts that need no models; the executor is only planned."""
    executor = plan_executor(cfg["executor"], bench.pair)
    serving = ServingRules.of(**cfg["serving"]) if "serving" in cfg else ServingRules()
    judge: Verifier = verifier or build_part(cfg["verifier"], {}, "verifier", Verifier)
    objects = bench.objects("policy", executor.plan, judge, serving)
    policy = build_part(cfg["policy"], objects, "policy", TreePolicy)
    check_choice(policy, judge, bench.clock)
    return policy, judge, executor, serving


def plan_executor(node: Mapping[str, Any], pair: ModelPair) -> Planned:
    keys = {key: value for key, value in node.items() if key != "_target_"}
    return planned(locate(node["_target_"], "executor", Executor), pair, **keys)


def _ranks(cfg: Mapping[str, Any], pair: ModelPair, clock: Clock) -> Ranks | None:
    """Returns what starts the processes of a distributed executor; None if all stages run in this
    process, as they do on a simulated clock, which computes the times of all ranks.
    """
    node = cfg["executor"]
    if node.get("transport") != "distributed" or clock.kind is ClockKind.SIMULATED:
        return None
    if not isinstance(clock, WallClock):
        raise UserError(
            f"clock._target_={cfg['clock']['_target_']} has no method report, which ranks that are"
            " processes need: add it (specdec.clocks.WallClock)"
        )
    from specdec.distributed.ranks import Ranks  # imported late: few runs need processes

    # This process resolves auto once for all ranks.
    own = {"dtype": pair.dtype} if pair.dtype and "dtype" in cfg["model"] else {}
    return Ranks(
        model={**cfg["model"], **own},
        clock=cfg["clock"],
        timeout_s=float(node["timeout_s"]),
        threads=cfg.get("threads"),
        trace=bool(cfg.get("trace")),
    )


_SECTIONS = ("source", "policy", "verifier", "executor", "serving")


def build(
    preset: str, bench: Workbench | None = None, *, verifier: Verifier | None = None, **keys: Any
) -> Parts:
    """Builds the strategy that ``strategy=NAME`` runs on the command line.

        parts = specdec.build("specpipe", width=4, stages=4)
        parts = specdec.build("speculative", Workbench(pair), verifier=RejectionVerifier())

    Args:
        preset: name of the strategy (``specdec list strategies``).
        bench: models, clock and seed. Default: the bundled pair and the wall clock.
        verifier: replaces the preset's verifier.
        keys: values of the preset's keys (``width``, or in full ``**{"policy.width": 4}``) or
            options of its groups (``executor="pipeline"``); None keeps the preset's value.
            ``stages`` moves a preset of one device to a pipeline.
    """
    words = [f"strategy={preset}"]
    if not isinstance(bench, Workbench | None):
        raise UserError(f"bench={bench!r:.60} is no Workbench: write Workbench(pair)")
    config = compose_config(words).values
    keys = {key: value for key, value in keys.items() if value is not None}
    if "stages" in keys and "stages" not in config["executor"]:
        words.append(f"executor={keys.pop('executor', 'pipeline')}")
        keys["executor.stages"] = keys.pop("stages")
    sections = {name: config.get(name) or {} for name in _SECTIONS}
    for key, value in keys.items():
        names = [f"{name}.{key}" for name, section in sections.items() if key in section]
        if "." in key or key in sections:
            names = [key]
        if not names:
            known = {name for section in sections.values() for name in section} - {"_target_"}
            raise UserError(f"the preset's parts have no key {key!r}: {did_you_mean(key, known)}")
        if len(names) > 1:
            raise UserError(f"{key} is a key of several parts: name one by {' or '.join(names)}")
        words.append(f"{names[0]}={value if isinstance(value, str) else json.dumps(value)}")
    composed = compose_config(words)
    check_config(composed.values, composed.choices)
    if bench is None:
        pair, seed = build_pair(composed.values["model"]), int(composed.values["seed"])
        bench = Workbench(pair, seed=seed)
    return build_parts(composed.values, bench, verifier=verifier)
