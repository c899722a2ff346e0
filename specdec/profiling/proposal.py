"""Simulates trees and device groupings on a profile, with the equations' estimates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.clocks import LatencyProfile
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals, summarise
from specdec.pairs import ModelPair
from specdec.profiling.equations import StepTimes, eq1_tbt, eq2_tbt, pipedec_latency
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The result of one tree and grouping. Times in milliseconds.

    Attributes:
        width, children: nodes per level and candidates per node of the tree.
        stages, group: number of pipeline stages, and devices per stage.
        hit_rate: simulated hit rate, p of the equations.
        steps_per_token: simulated.
        tbt: simulated mean time between tokens.
        eq1, eq2: SpecPipe's equations at that hit rate.
        pipedec: PipeDec's latency, which assumes that every token is a hit.
        draft_bound: whether a draft pass takes longer than the stages' computation.
    """

    width: int
    children: int
    stages: int
    group: int
    hit_rate: float
    steps_per_token: float
    tbt: float
    eq1: float
    eq2: float
    pipedec: float
    draft_bound: bool

    def to_json(self) -> dict[str, Any]:
        """All attributes, and the equations' relative errors against the simulator."""
        values = asdict(self)
        errors = {
            f"{name}_error": values[name] / self.tbt - 1.0 for name in ("eq1", "eq2", "pipedec")
        }
        return {**values, **errors}


def propose(
    cfg: Mapping[str, Any],
    pair: ModelPair,
    prompts: Sequence[TokenPrompt],
    stop: StopRules,
    profile: LatencyProfile,
    *,
    widths: Sequence[int],
    children: Sequence[int],
    groups: Sequence[int],
    on_cell: Callable[[Cell], None] = lambda _: None,
) -> list[Cell]:
    """Simulates SpecPipe with several trees and groupings on a profile.

    Tries every width with every number of children at one device per stage, then every grouping
    with the fastest tree.

    Args:
        cfg: resolved configuration; its source, verifier, sampling and seed are used, and
            ``executor.stages`` is the number of devices.
        pair, prompts, stop: models, prompts and stop rules.
        profile: costs of one device.
        widths, children, groups: the values to try.
        on_cell: called with each result.

    Returns:
        The results, in the order tried.

    Raises:
        UserError: a grouping does not divide the number of devices.
    """
    devices = int(cfg["executor"]["stages"])
    wrong = [g for g in groups if devices % g]
    if wrong:
        raise UserError(
            f"profiling.groups={list(groups)}: {wrong[0]} does not divide the"
            f" executor.stages={devices} devices; name divisors of {devices}"
        )
    cells: list[Cell] = []

    def try_cell(width: int, num_children: int, group: int) -> None:
        cells.append(_cell(cfg, pair, prompts, stop, profile, (width, num_children, group)))
        on_cell(cells[-1])

    for width in widths:
        for num_children in children:
            try_cell(width, num_children, 1)
    best = min(cells, key=lambda cell: cell.tbt)
    for group in groups:
        if group > 1:
            try_cell(best.width, best.children, group)
    return cells


def _cell(
    cfg: Mapping[str, Any],
    pair: ModelPair,
    prompts: Sequence[TokenPrompt],
    stop: StopRules,
    profile: LatencyProfile,
    tree: tuple[int, int, int],
) -> Cell:
    width, children, group = tree
    stages = int(cfg["executor"]["stages"]) // group
    policy = {
        "_target_": "specdec.policies.FixedWidth",
        **{"width": width, "children": children, "levels_per_step": 1},
    }
    clock, groups = clock_node(profile), None if group == 1 else [group] * stages
    # The simulated clock runs in one process.
    executor = {**cfg["executor"], "stages": stages, "groups": groups, "transport": "in_process"}
    changes = {"policy": policy, "clock": clock, "executor": executor}
    summary = decode_summary({**cfg, **changes}, pair, prompts, stop, needs=("hit_rate",))
    hit_rate = summary["hit_rate"]
    times = StepTimes.of(profile, width=width, stages=stages, group=group)
    return Cell(
        width=width,
        children=children,
        stages=stages,
        group=group,
        hit_rate=hit_rate,
        steps_per_token=summary["steps_per_token"],
        tbt=summary["tbt_ms_mean"],
        eq1=eq1_tbt(times.stages, hit_rate),
        eq2=eq2_tbt(max(times.stages), stages, hit_rate),
        pipedec=pipedec_latency(times),
        draft_bound=times.draft > times.compute,
    )


def decode_summary(
    cfg: Mapping[str, Any],
    pair: ModelPair,
    prompts: Sequence[TokenPrompt],
    stop: StopRules,
    *,
    warm_up: bool = False,
    needs: Sequence[str] = (),
) -> dict[str, Any]:
    """Summary of decoding the prompts one by one.

    Args:
        cfg: resolved configuration, without regard to ``batch_size`` and ``trace``.
        pair, prompts, stop: models, prompts and stop rules.
        warm_up: decode the first prompt once before.
        needs: metrics that must not be None, besides the time between tokens.

    Raises:
        UserError: the outputs are too short for these metrics.
    """
    runner = PartsRunner(cfg={**cfg, "batch_size": 1, "trace": False}, pair=pair, stop=stop)
    results: list[RequestResult] = []
    try:
        if warm_up:
            runner.run(prompts[:1], lambda _: None)
        totals = [runner.run([prompt], results.append) for prompt in prompts]
    finally:
        runner.close()
    summary = summarise(results, RunTotals.merge(totals))
    if not summary["tbt_ms_mean"] or any(summary[name] is None for name in needs):
        raise UserError(
            f"max_new_tokens={cfg['max_new_tokens']} is too few for a measurement: raise it"
        )
    return summary


def clock_node(profile: LatencyProfile) -> dict[str, Any]:
    """The ``clock`` section of a configuration that simulates a profile."""
    return {
        "kind": "simulated",
        "profile": profile.name,
        "scale": 1.0,
        "note": profile.note,
        "costs": costs_node(profile),
    }


def costs_node(profile: LatencyProfile) -> dict[str, Any]:
    """The cost curves by kind, as in a profile's YAML."""
    costs: dict[str, Any] = {}
    for kind, curve in profile.costs.items():
        costs[kind] = {"tokens": list(curve.tokens), "ms": list(curve.ms)}
        if curve.block_tokens:
            costs[kind] |= {"block_tokens": curve.block_tokens, "block_ms": curve.block_ms}
    return costs
