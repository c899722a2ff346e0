"""From a resolved configuration to the parts of a strategy.

A part is a node ``{"_target_": "package.Class", key: value, ...}``. Keys are constructor arguments;
what a constructor needs beyond plain values (the draft's runner, the clock, ...) it gets by
parameter name. So a part from outside this repository is one file and one YAML. Unknown keys and
combinations that cannot be right are refused here, with the reason.
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
from specdec.executors.layout import StageLayout
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.pairs import ModelPair, ReplayModels
from specdec.parts.build import build_part, locate
from specdec.serving.rules import ServingRules, outside_scheduler
from specdec.serving.scheduler import FifoScheduler

DRAFT_MODEL_TARGET = "specdec.sources.DraftModelSource"
SYNTHETIC_TARGET = "specdec.sources.SyntheticSource"


def compose(cfg: Mapping[str, Any], pair: ModelPair) -> Parts:
    """Builds and checks the parts that ``cfg`` names.

    Args:
        cfg: resolved plain configuration (``conf/config.yaml``) with the nodes source, policy,
            verifier, executor, clock and the key seed.
        pair: target and draft.

    Raises:
        UserError: for an unknown key, a bad value or parts that do not fit together.
    """
    meter = Meter()
    timeline = Timeline() if cfg.get("trace") else None
    clock = build_clock(cfg["clock"], meter, timeline=timeline)
    bench = Workbench(pair, seed=int(cfg["seed"]), clock=clock, meter=meter)
    stages, ranks = _stages(cfg["executor"], pair), _ranks(cfg, clock)
    known: dict[str, Callable[[], Any]] = {
        "latency": lambda: 1 if stages is None else stages.stages,
        "profile": lambda: getattr(clock, "profile", None),
    }
    serving = ServingRules.of(cfg["serving"]) if "serving" in cfg else None
    policy = build_part(cfg["policy"], known, "policy", TreePolicy)
    verifier = build_part(cfg["verifier"], {}, "verifier", Verifier)
    check_choice(policy, verifier, clock)  # before a source loads the draft
    runtime: dict[str, Callable[[], Any]] = {
        "runner": lambda: bench.draft_runner(stages, ranks),
        "clock": lambda: bench.clock,
        "meter": lambda: bench.meter,
        "draws": lambda: bench.draws,
        "vocab_size": lambda: pair.vocab_size,
        "pair": lambda: pair.synthetic(),
        "katz": lambda: pair.katz(),
        "load_heads": lambda: partial(bench.medusa_heads, ranks=ranks),
        "sample": lambda: verifier.needs.draft_probs,
        "places": lambda: bench.exit_places(stages),
        "front": lambda: bench.exit_front(stages) if stages and stages.after_drafting else None,
    }
    try:
        source = build_part(_fitted_source(cfg, pair), runtime, "source", TokenSource)
        parts = bench.parts(
            source=source,
            policy=policy,
            verifier=verifier,
            stages=stages,
            ranks=ranks,
            serving=serving,
        )
        scheduler = outside_scheduler(cfg.get("serving", {}))
        return replace(parts, scheduler=scheduler or FifoScheduler)
    finally:
        bench.release()


def _fitted_source(cfg: Mapping[str, Any], pair: ModelPair) -> Any:
    """The source node, with draft models replaced where the pair has none."""
    if isinstance(pair, ReplayModels):
        return pair.fitted_source(cfg["source"], cfg["policy"])
    return _without_models(cfg["source"]) if pair.is_synthetic else cfg["source"]


def _without_models(node: Any) -> Any:
    """A node with synthetic sources in place of draft models."""
    if isinstance(node, list):
        return [_without_models(v) for v in node]
    if not isinstance(node, Mapping):
        return node
    if node.get("_target_") == DRAFT_MODEL_TARGET:
        return {"_target_": SYNTHETIC_TARGET}
    return {key: _without_models(value) for key, value in node.items()}


def _ranks(cfg: Mapping[str, Any], clock: Clock) -> Ranks | None:
    """Processes for the stages where ``executor.transport=distributed`` asks for them.

    A simulated clock needs none: it knows all ranks.
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
    """Stages of a pipeline or of an early exit, None for the local executor.

    ``stages: null`` gives ceil(N / E) of them (PPSD 4.1).

    Raises:
        UserError: for an executor that this version cannot build.
    """
    cls = locate(node["_target_"], "executor", Executor)
    if cls in (PipelineExecutor, EarlyExitExecutor) and node.get("stages") is None:
        node = {**node, "stages": -(-pair.num_layers // pair.exit_layer)}
    if cls is EarlyExitExecutor:
        return StageLayout(stages=int(node["stages"]), after_drafting=True)
    if cls is PipelineExecutor:
        groups = node.get("groups")
        return StageLayout(
            stages=int(node["stages"]),
            groups=None if groups is None else tuple(groups),
            balanced=node.get("split") == "balanced",
            degree=node.get("target_degree") or 1,
            draft_degree=node.get("draft_degree") or 1,
            shared=bool(node.get("shared")),
        )
    if cls is LocalExecutor:
        return None
    raise UserError(
        f"executor._target_={node['_target_']} is not an executor this version can build;"
        " use executor=local, executor=pipeline or executor=early_exit"
    )
