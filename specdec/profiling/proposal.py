"""Which width, children and grouping a profile recommends: the equations beside the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.clocks import CostCurve, LatencyProfile
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals, summarise
from specdec.pairs import ModelPair
from specdec.profiling.equations import StepTimes, eq1_tbt, eq2_tbt, pipedec_latency
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One tree and grouping, simulated and estimated. Times in milliseconds.

    Attributes:
        width, children: of the tree.
        stages, group: pipeline stages, and devices in each.
        hit_rate: simulated; what the equations take as p.
        steps_per_token: simulated.
        tbt: simulated, mean.
        eq1, eq2: SpecPipe's equations at that hit rate.
        pipedec: PipeDec's latency, which assumes that every token is a hit.
        draft_bound: whether the draft, which works beside the stages' computation, takes longer.
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

    @property
    def eq2_error(self) -> float:
        """Of Eq. 2 against the simulator, relative."""
        return self.eq2 / self.tbt - 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, errors included."""
        found = {name: getattr(self, name) for name in self.__slots__}
        errors = {
            f"{name}_error": getattr(self, name) / self.tbt - 1.0
            for name in ("eq1", "eq2", "pipedec")
        }
        return {**found, **errors}


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
    """Simulates trees and groupings of SpecPipe on a profile and sets the equations beside them.

    Every width is tried with every number of children at one device per stage; then the fastest
    of them with every grouping.

    Args:
        cfg: resolved; its source, verifier, sampling and seed are used, ``executor.stages`` is the
            number of devices.
        pair, prompts, stop: what is decoded.
        profile: costs of one device.
        widths, children, groups: what is tried.
        on_cell: told of each cell.

    Returns:
        The cells, in the order tried.

    Raises:
        UserError: a grouping that does not divide the devices.
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
    # Nothing of the simulator runs in other processes.
    executor = {**cfg["executor"], "stages": stages, "groups": groups, "transport": "in_process"}
    changed = {"policy": policy, "clock": clock, "executor": executor, "batch_size": 1}
    runner = PartsRunner(cfg={**cfg, **changed, "trace": False}, pair=pair, stop=stop)
    results: list[RequestResult] = []
    try:
        totals = [runner.run([prompt], results.append) for prompt in prompts]
    finally:
        runner.close()
    found = summarise(results, RunTotals.merge(totals))
    hit_rate, tbt = found["hit_rate"], found["tbt_ms_mean"]
    if hit_rate is None or not tbt:
        raise UserError(
            f"max_new_tokens={cfg['max_new_tokens']} is too few to see a tree at work: raise it"
        )
    times = StepTimes.of(profile, width=width, stages=stages, group=group)
    return Cell(
        width=width,
        children=children,
        stages=stages,
        group=group,
        hit_rate=hit_rate,
        steps_per_token=found["steps_per_token"],
        tbt=tbt,
        eq1=eq1_tbt(times.stages, hit_rate),
        eq2=eq2_tbt(max(times.stages), stages, hit_rate),
        pipedec=pipedec_latency(times),
        draft_bound=times.draft > times.compute,
    )


def clock_node(profile: LatencyProfile) -> dict[str, Any]:
    """The ``clock`` section that simulates a profile."""
    return {
        "kind": "simulated",
        "profile": profile.name,
        "scale": 1.0,
        "note": profile.note,
        "costs": {kind: curve_node(curve) for kind, curve in profile.costs.items()},
    }


def curve_node(curve: CostCurve) -> dict[str, Any]:
    """A curve as a profile's YAML states it."""
    found: dict[str, Any] = {"tokens": list(curve.tokens), "ms": list(curve.ms)}
    if curve.block_tokens:
        found |= {"block_tokens": curve.block_tokens, "block_ms": curve.block_ms}
    return found
