"""From a resolved configuration to the parts of a strategy.

A part is a node ``{"_target_": "package.Class", key: value, ...}``. Keys are constructor arguments;
what a constructor needs beyond plain values (the draft's runner, the clock, ...) it gets by
parameter name. So a part from outside this repository is one file and one YAML. Unknown keys and
combinations that cannot be right are refused here, with the reason.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from specdec.clocks import (
    CONTROLLER,
    Clock,
    ClockKind,
    CostCurve,
    LatencyProfile,
    MeasuredClock,
    PacedClock,
    SimulatedClock,
    Timeline,
)
from specdec.errors import UserError
from specdec.executors import EarlyExitExecutor, LocalExecutor, PipelineExecutor
from specdec.executors.distributed import Ranks
from specdec.executors.layout import StageLayout
from specdec.metrics.meter import Meter
from specdec.pairs import ModelPair, ReplayModels
from specdec.refusals import check_choice
from specdec.serving.rules import ServingRules
from specdec.workbench import Parts, Workbench

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
    stages, ranks = _stages(cfg["executor"], pair), _ranks(cfg)
    known: dict[str, Callable[[], Any]] = {
        "latency": lambda: 1 if stages is None else stages.stages,
        "profile": lambda: getattr(clock, "profile", None),
    }
    serving = ServingRules.of(cfg["serving"]) if "serving" in cfg else None
    policy = build_part(cfg["policy"], known, "policy")
    verifier = build_part(cfg["verifier"], {}, "verifier")
    check_choice(policy, verifier, clock)  # before a source loads the draft
    runtime: dict[str, Callable[[], Any]] = {
        "runner": lambda: bench.draft_runner(stages, ranks),
        "clock": lambda: bench.clock,
        "meter": lambda: bench.meter,
        "draws": lambda: bench.draws,
        "vocab_size": lambda: pair.vocab_size,
        "pair": pair.synthetic,
        "katz": pair.katz,
        "load_heads": lambda: partial(bench.medusa_heads, ranks=ranks),
        "sample": lambda: verifier.needs.draft_probs,
        "places": lambda: bench.exit_places(stages),
        "front": lambda: bench.exit_front(stages) if stages and stages.after_drafting else None,
    }
    try:
        source = build_part(_fitted_source(cfg, pair), runtime, "source")
        return bench.parts(
            source=source,
            policy=policy,
            verifier=verifier,
            stages=stages,
            ranks=ranks,
            serving=serving,
        )
    finally:
        bench.release()


def build_part(
    node: Mapping[str, Any], runtime: Mapping[str, Callable[[], Any]], where: str
) -> Any:
    """Builds one part from its configuration node; nested nodes are built first.

    Raises:
        UserError: for a class that cannot be imported, an unknown key or a refused value.
    """
    cls = locate(node["_target_"], where)
    parameters = inspect.signature(cls).parameters
    kwargs: dict[str, Any] = {}
    for key, value in node.items():
        if key == "_target_":
            continue
        if key not in parameters:
            close = difflib.get_close_matches(key, parameters, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(parameters)}"
            raise UserError(f"{where}.{key}: {cls.__name__} has no such key{hint}")
        kwargs[key] = _built(value, runtime, f"{where}.{key}")
    for name in parameters:
        if name not in kwargs and name in runtime:
            kwargs[name] = runtime[name]()
    try:
        return cls(**kwargs)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} ({cls.__name__}): {error}") from error


def locate(path: str, where: str) -> type:
    """Imports the class that a ``_target_`` names.

    Raises:
        UserError: if there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{where}._target_={path}: {error}; give an importable class as package.module.Class"
        ) from error


def build_clock(
    node: Mapping[str, Any],
    meter: Meter,
    *,
    rank: int = CONTROLLER,
    timeline: Timeline | None = None,
) -> Clock:
    """Builds one process's clock from ``clock=``.

    Args:
        node: resolved, with the profile's costs.
        meter: the process's meter, which a wall clock tells of its waits.
        rank: the rank that this process is.
        timeline: gets the work of a traced run.
    """
    kind = ClockKind(node["kind"])
    if kind is ClockKind.MEASURED:
        return MeasuredClock(meter=meter, rank=rank, timeline=timeline)
    profile, scale = build_profile(node), float(node["scale"])
    if kind is ClockKind.SIMULATED:
        return SimulatedClock(profile, scale=scale, timeline=timeline)
    return PacedClock(profile, scale=scale, meter=meter, rank=rank, timeline=timeline)


def build_profile(node: Mapping[str, Any]) -> LatencyProfile:
    """The latency profile of a clock's node: its ``profile`` (a name), ``costs`` and ``note``."""
    costs = {
        kind: CostCurve(
            tokens=tuple(curve["tokens"]),
            ms=tuple(curve["ms"]),
            block_tokens=curve.get("block_tokens", 0),
            block_ms=curve.get("block_ms", 0.0),
        )
        for kind, curve in node["costs"].items()
    }
    return LatencyProfile(name=node["profile"], costs=costs, note=node.get("note", ""))


def _built(value: Any, runtime: Mapping[str, Callable[[], Any]], where: str) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return build_part(value, runtime, where)
    if isinstance(value, list) and any(isinstance(v, Mapping) and "_target_" in v for v in value):
        return [_built(v, runtime, f"{where}[{i}]") for i, v in enumerate(value)]
    return value


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


def _ranks(cfg: Mapping[str, Any]) -> Ranks | None:
    """Processes for the stages where ``executor.transport=distributed`` asks for them.

    A simulated clock needs none: it knows all ranks.
    """
    node = cfg["executor"]
    if node.get("transport") != "distributed" or cfg["clock"]["kind"] == ClockKind.SIMULATED:
        return None
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
    cls = locate(node["_target_"], "executor")
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
