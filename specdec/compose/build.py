"""Builds a strategy from a resolved configuration.

A part is a node ``{"_target_": "package.Class", key: value, ...}``. Keys are constructor arguments;
an argument that no configuration can state is passed by its name, if it is a key of ``RUNTIME``. So
a part from outside this repository is one file and one YAML. Unknown keys and combinations that
cannot work raise ``UserError``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from specdec.clocks import Clock, ClockKind, Timeline, WallClock
from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts, Planned, Workbench, check_choice, planned
from specdec.errors import UserError
from specdec.executors.layout import EarlyExitPlan
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.pairs import ModelPair
from specdec.parts.build import build_part, locate
from specdec.serving.rules import ServingRules, outside_scheduler
from specdec.serving.scheduler import FifoScheduler

if TYPE_CHECKING:
    from specdec.distributed.ranks import Ranks

RUNTIME = {
    "latency": "policy: steps from submission to answer; None where answers come when they come",
    "in_flight": "policy: number of batches that the target works on at the same time",
    "profile": "policy: ``LatencyProfile`` of the clock; None for the wall clock",
    "pair": "source, executor: target and draft, a ``specdec.pairs.ModelPair``",
    "runner": "source: name of a model (draft, middle) -> its ``ModelRunner``",
    "clock": "source, executor: ``Clock`` that work is charged to",
    "meter": "source, executor: ``Meter`` that counts model passes",
    "draws": "source, executor: ``KeyedDraws`` of the run's seed",
    "vocab_size": "source: size of the target's vocabulary",
    "sample": "source: whether candidates are sampled, for verifiers that need their distribution",
    "make_first_stage": "source: builds the target's first layers with exit heads (``FirstStage``),"
    " given the number of layers before each exit; None where the executor returns exits",
    "first_stage": "executor: the ``FirstStage`` that the source has built; None without one",
    "blocks": "executor: number of blocks of each stage's paged cache (None: not paged), and tokens"
    " per block",
    "over_ranks": "executor: runs the stages of a pipeline on processes"
    " (``specdec.executors.models.OverRanks``); None where everything runs in this process",
    "free_rank": "source: a clock rank that no device of the executor has; another one each time",
}
"""The kinds of part that may request an object by its name, and what the object is.

Constructors of policies and sources request them as arguments, executors as arguments of ``build``.
The parts are made in this order: plan of the executor, policy, verifier, source, executor.
"""


def compose(cfg: Mapping[str, Any], pair: ModelPair) -> Parts:
    """Builds and checks the parts of a resolved plain configuration (``conf/config.yaml``).

    Raises:
        UserError: an unknown key, a bad value, or parts that do not fit together.
    """
    meter = Meter()
    timeline = Timeline() if cfg.get("trace") else None
    clock = build_clock(cfg["clock"], meter, timeline=timeline)
    ranks = _ranks(cfg, pair, clock)
    bench = Workbench(pair, seed=int(cfg["seed"]), clock=clock, meter=meter, ranks=ranks)
    return build_parts(cfg, bench)


def build_parts(
    cfg: Mapping[str, Any], bench: Workbench, *, verifier: Verifier | None = None
) -> Parts:
    """Builds the parts of a configuration on a workbench.

    Clock and seed are those of the workbench, not of ``cfg``. A given ``verifier`` replaces the
    configuration's.
    """
    pair, executor = bench.pair, plan_executor(cfg["executor"], bench.pair)
    plan = executor.plan
    serving = ServingRules.of(**cfg["serving"]) if "serving" in cfg else None
    known: dict[str, Callable[[], Any]] = {
        "latency": lambda: plan.latency,
        "in_flight": lambda: plan.in_flight,
        "profile": lambda: bench.clock.profile,
    }
    policy = build_part(cfg["policy"], known, "policy", TreePolicy)
    judge: Verifier = verifier or build_part(cfg["verifier"], {}, "verifier", Verifier)
    check_choice(policy, judge, bench.clock)  # before a source loads the draft
    free_ranks = count(plan.num_ranks + 1)
    runtime: dict[str, Callable[[], Any]] = {
        "pair": bench.source_pair,
        "runner": lambda: partial(bench.runner, plan=plan),
        "clock": lambda: bench.clock,
        "meter": lambda: bench.meter,
        "draws": lambda: bench.draws,
        "vocab_size": lambda: pair.vocab_size,
        "sample": lambda: judge.needs.draft_probs,
        "make_first_stage": lambda: (
            partial(bench.make_first_stage, plan) if isinstance(plan, EarlyExitPlan) else None
        ),
        "free_rank": lambda: next(free_ranks),
    }
    source = pair.fitted_source(cfg["source"], cfg["policy"])
    try:
        parts = bench.parts(
            source=build_part(source, runtime, "source", TokenSource),
            policy=policy,
            verifier=judge,
            executor=executor,
            serving=serving,
        )
        scheduler = outside_scheduler(cfg.get("serving", {}))
        return replace(parts, scheduler=scheduler or FifoScheduler)
    finally:
        bench.release()


def plan_executor(node: Mapping[str, Any], pair: ModelPair) -> Planned:
    cls = locate(node["_target_"], "executor", Executor)
    keys = {key: value for key, value in node.items() if key != "_target_"}
    return planned(cls, pair, **keys)


def _ranks(cfg: Mapping[str, Any], pair: ModelPair, clock: Clock) -> Ranks | None:
    """Returns the processes of a distributed executor, or None if everything runs in this process.

    A simulated clock runs all ranks in this process: it computes their times instead of measuring.
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

    model = dict(cfg["model"])
    if "dtype" in model:  # this process resolves auto once for all ranks
        model["dtype"] = pair.dtype or model["dtype"]
    return Ranks(
        model=model,
        clock=cfg["clock"],
        timeout_s=float(node["timeout_s"]),
        threads=cfg.get("threads"),
        trace=bool(cfg.get("trace")),
    )
