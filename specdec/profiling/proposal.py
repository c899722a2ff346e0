from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from specdec.clocks import LatencyProfile
from specdec.clocks.timed_runs import timed_run
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals, summarise
from specdec.pairs import ModelPair
from specdec.profiling.equations import StepTimes, eq1_tbt, eq2_tbt, pipedec_latency
from specdec.profiling.options import ProfilingOptions
from specdec.runs.jobs import Progress, prepare, stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The result of one tree and grouping, with the equations' estimates; times in milliseconds.

    Attributes:
        width, children: nodes per level and candidates per node of the tree.
        group: devices per stage.
        hit_rate, steps_per_token, tbt: simulated; tbt is the mean time between tokens.
        eq1, eq2: SpecPipe's equations with the simulated hit rate as p.
        pipedec: PipeDec's latency, which assumes that every token is a hit.
        draft_bound: whether a draft pass takes longer than the computation of a stage.
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
        """Returns all fields, and the relative errors of the equations against the simulator."""
        values = asdict(self)
        errors = {
            f"{name}_error": values[name] / self.tbt - 1.0 for name in ("eq1", "eq2", "pipedec")
        }
        return {**values, **errors}


@dataclass(frozen=True, slots=True)
class Workload:
    """The models and prompts of a configuration, to be decoded one by one under changed sections.

    ``cfg`` is the resolved configuration. Its ``batch_size`` and ``trace`` are ignored.
    """

    cfg: Mapping[str, Any]
    options: ProfilingOptions
    pair: ModelPair
    prompts: Sequence[TokenPrompt]

    @staticmethod
    def of(cfg: Mapping[str, Any], progress: Progress) -> Workload:
        """Sets the number of threads and loads the models."""
        if cfg.get("threads"):
            torch.set_num_threads(int(cfg["threads"]))
        progress.phase("loading models", None)
        pair, prompts, _ = prepare(cfg)
        return Workload(cfg, ProfilingOptions(**cfg["profiling"]), pair, prompts)

    def decode(
        self, changes: Mapping[str, Any], *, warm_up: bool = False, needs: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Decodes all prompts and returns the summary.

        Args:
            changes: sections that replace those of the configuration.
            warm_up: whether to decode the first prompt once before.
            needs: metrics that must not be None, besides the time between tokens; ``UserError`` if
                the outputs are too short for them.
        """
        cfg = {**self.cfg, **changes, "batch_size": 1, "trace": False}
        runner = PartsRunner(cfg=cfg, pair=self.pair, stop=stop_rules(cfg, self.pair))
        results: list[RequestResult] = []
        try:
            if warm_up:
                runner.run(self.prompts[:1], lambda _: None)
            with timed_run():
                totals = [runner.run([prompt], results.append) for prompt in self.prompts]
        finally:
            runner.close()
        summary = summarise(results, RunTotals.merge(totals))
        if not summary["tbt_ms_mean"] or any(summary[name] is None for name in needs):
            raise UserError(
                f"max_new_tokens={cfg['max_new_tokens']} is too few for a measurement: raise it"
            )
        return summary


def propose(work: Workload, profile: LatencyProfile) -> Iterator[Cell]:
    """Simulates SpecPipe with several trees and groupings on a profile of one device.

    Tries every width with every number of children (``profiling.widths``, ``children``) at one
    device per stage, then every grouping (``profiling.groups``) with the fastest tree.
    ``executor.stages`` is the number of devices.
    """
    options, devices = work.options, int(work.cfg["executor"]["stages"])
    wrong = [g for g in options.groups if devices % g]
    if wrong:
        raise UserError(
            f"profiling.groups={options.groups}: {wrong[0]} does not divide the"
            f" executor.stages={devices} devices; name divisors of {devices}"
        )
    cells = []
    for width, children in product(options.widths, options.children):
        cells.append(_cell(work, profile, width, children, 1))
        yield cells[-1]
    best = min(cells, key=lambda cell: cell.tbt)
    for group in options.groups:
        if group > 1:
            yield _cell(work, profile, best.width, best.children, group)


def _cell(work: Workload, profile: LatencyProfile, width: int, children: int, group: int) -> Cell:
    cfg = work.cfg
    stages = int(cfg["executor"]["stages"]) // group
    policy = {
        "_target_": "specdec.policies.FixedWidth",
        **{"width": width, "children": children, "levels_per_step": 1},
    }
    clock, groups = clock_node(profile), None if group == 1 else [group] * stages
    # The simulated clock needs all stages in one process.
    executor = {**cfg["executor"], "stages": stages, "groups": groups, "transport": "in_process"}
    changes = {"policy": policy, "clock": clock, "executor": executor}
    summary = work.decode(changes, needs=("hit_rate",))
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


def clock_node(profile: LatencyProfile) -> dict[str, Any]:
    return {
        "kind": "simulated",
        "profile": profile.name,
        "scale": 1.0,
        "note": profile.note,
        "costs": costs_node(profile),
    }


def costs_node(profile: LatencyProfile) -> dict[str, Any]:
    """Returns the cost curves by kind of work, as in a profile's YAML."""
    costs: dict[str, Any] = {}
    for kind, curve in profile.costs.items():
        costs[kind] = {"tokens": list(curve.tokens), "ms": list(curve.ms)}
        if curve.block_tokens:
            costs[kind] |= {"block_tokens": curve.block_tokens, "block_ms": curve.block_ms}
    return costs
