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
from typing import Any

from specdec.clocks import Clock, ClockKind, Timeline, WallClock
from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.compose.refusals import check_choice
from specdec.compose.workbench import Parts, Workbench
from specdec.distributed.executor import Ranks
from specdec.errors import UserError
from specdec.executors import EarlyExitExecutor, LocalExecutor, PipelineExecutor
from specdec.executors.layout import PipelineOptions, StageLayout
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.pairs import ModelPair
from specdec.parts.build import build_part, locate
from specdec.serving.rules import ServingRules, outside_scheduler
from specdec.serving.scheduler import FifoScheduler

RUNTIME = {
    "pair": "target and draft, a ``specdec.sources.pair.SourcePair``",
    "runner": "``ModelRunner`` of the draft model",
    "clock": "``Clock`` that work is charged to",
    "meter": "``Meter`` that counts model passes",
    "draws": "``KeyedDraws`` of the run's seed",
    "vocab_size": "size of the target's vocabulary",
    "sample": "whether candidates are sampled, for verifiers that need their distribution",
    "exit_front": "builds the target's first layers with exit heads, given the number of layers"
    " before each exit; None where the executor returns exits (``ExitFront``)",
    "latency": "steps from submission to answer",
    "profile": "``LatencyProfile`` of the clock; None for the wall clock",
}
"""Arguments that constructors of sources and policies may request, by name. Policies are built
first and may request ``latency`` and ``profile``; sources may request all others."""


def compose(cfg: Mapping[str, Any], pair: ModelPair) -> Parts:
    """Builds and checks the parts of a configuration.

    Args:
        cfg: resolved plain configuration (``conf/config.yaml``) with the nodes source, policy,
            verifier, executor and clock, and the key seed.
        pair: target and draft.

    Raises:
        UserError: an unknown key, a bad value, or parts that do not fit together.
    """
    meter = Meter()
    timeline = Timeline() if cfg.get("trace") else None
    clock = build_clock(cfg["clock"], meter, timeline=timeline)
    bench = Workbench(pair, seed=int(cfg["seed"]), clock=clock, meter=meter)
    return build_parts(cfg, bench, ranks=_ranks(cfg, clock))


def build_parts(
    cfg: Mapping[str, Any],
    bench: Workbench,
    *,
    ranks: Ranks | None = None,
    verifier: Verifier | None = None,
) -> Parts:
    """Builds the strategy of a configuration on a workbench.

    Args:
        cfg: the nodes source, policy, verifier and executor, optionally serving.
        bench: models, clock and seed.
        ranks: processes of the executor; None for this process alone.
        verifier: replaces that of ``cfg``.

    Raises:
        UserError: see ``compose``.
    """
    pair, stages = bench.pair, _stages(cfg["executor"], bench.pair)
    serving = ServingRules.of(**cfg["serving"]) if "serving" in cfg else None
    known: dict[str, Callable[[], Any]] = {
        "latency": lambda: 1 if stages is None else stages.stages,
        "profile": lambda: getattr(bench.clock, "profile", None),
    }
    policy = build_part(cfg["policy"], known, "policy", TreePolicy)
    judge: Verifier = verifier or build_part(cfg["verifier"], {}, "verifier", Verifier)
    check_choice(policy, judge, bench.clock)  # before a source loads the draft
    front = stages if stages is not None and stages.after_drafting else None
    runtime: dict[str, Callable[[], Any]] = {
        "pair": lambda: bench.source_pair(ranks),
        "runner": lambda: bench.draft_runner(stages, ranks),
        "clock": lambda: bench.clock,
        "meter": lambda: bench.meter,
        "draws": lambda: bench.draws,
        "vocab_size": lambda: pair.vocab_size,
        "sample": lambda: judge.needs.draft_probs,
        "exit_front": lambda: None if front is None else partial(bench.exit_front, front),
    }
    assert RUNTIME.keys() == {*known, *runtime}, "RUNTIME documents every argument"
    fitted = getattr(pair, "fitted_source", None)
    source_node = cfg["source"] if fitted is None else fitted(cfg["source"], cfg["policy"])
    try:
        parts = bench.parts(
            source=build_part(source_node, runtime, "source", TokenSource),
            policy=policy,
            verifier=judge,
            stages=stages,
            ranks=ranks,
            serving=serving,
        )
        scheduler = outside_scheduler(cfg.get("serving", {}))
        return replace(parts, scheduler=scheduler or FifoScheduler)
    finally:
        bench.release()


def _ranks(cfg: Mapping[str, Any], clock: Clock) -> Ranks | None:
    """Processes of a distributed executor; None for a single process.

    A simulated clock runs all ranks in one process.
    """
    node = cfg["executor"]
    if node.get("transport") != "distributed" or clock.kind is ClockKind.SIMULATED:
        return None
    if not isinstance(clock, WallClock):
        raise UserError(
            f"clock._target_={cfg['clock']['_target_']} has no method report, which ranks that are"
            " processes need: add it (specdec.clocks.WallClock)"
        )
    return Ranks(
        model=cfg["model"],
        clock=cfg["clock"],
        timeout_s=float(node["timeout_s"]),
        threads=cfg.get("threads"),
        trace=bool(cfg.get("trace")),
    )


def _stages(node: Mapping[str, Any], pair: ModelPair) -> StageLayout | None:
    """Stages of a pipeline or of an early exit; None for the local executor.

    ``stages: null`` gives ceil(N / E) stages (PPSD 4.1).

    Raises:
        UserError: an unknown executor.
    """
    cls = locate(node["_target_"], "executor", Executor)
    if cls is LocalExecutor:
        return None
    if cls not in (PipelineExecutor, EarlyExitExecutor):
        raise UserError(
            f"executor._target_={node['_target_']} is not an executor this version can build;"
            " use executor=local, executor=pipeline or executor=early_exit"
        )
    options = PipelineOptions(**{key: value for key, value in node.items() if key != "_target_"})
    stages = options.stages or -(-pair.num_layers // pair.exit_layer)
    if cls is EarlyExitExecutor:
        return StageLayout(stages=stages, after_drafting=True)
    return options.layout(stages)
