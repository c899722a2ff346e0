"""Tries trees, groupings and splits of devices on a profile, beside the papers' estimates.

Letters of the estimates: N stages, w tree width, p probability that the last stage's token is in
the tree, T time of a step. Both of SpecPipe's equations are reconstructed, because the available
text has no formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Annotated, Any

import torch
import yaml
from pydantic import AfterValidator, Field

from specdec.clocks import LatencyProfile, Work
from specdec.clocks.build import build_profile
from specdec.clocks.profile import curve_at
from specdec.clocks.timed_runs import timed_run
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals, summarise
from specdec.pairs import ModelPair
from specdec.parts.fields import Count, Text, expects, validated
from specdec.policies.best_first import UNTIL_READY
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.progress import Progress
from specdec.runs.runners import PartsRunner, TokenPrompt


def _rises(counts: list[int]) -> list[int]:
    assert all(a < b for a, b in pairwise(counts))
    return counts


_Counts = Annotated[
    list[Count],
    Field(min_length=1),
    AfterValidator(_rises),
    expects("it must be a list of increasing whole numbers of at least 1"),
]
_FileName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_-]+$"),
    expects("it must be a name of letters, digits, - and _"),
]


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingOptions:
    name: _FileName
    use: Text | None
    tokens: _Counts
    repeats: Count
    context: Count
    transfer: bool
    widths: _Counts
    children: _Counts
    groups: _Counts
    devices: Annotated[int, Field(ge=2)] | None
    targets: _Counts
    bs: _Counts
    w: _Counts


def load(cfg: Mapping[str, Any], progress: Progress) -> tuple[ModelPair, list[TokenPrompt]]:
    if cfg.get("threads"):
        torch.set_num_threads(int(cfg["threads"]))
    pair, prompts, _ = prepare(cfg, progress=progress)
    return pair, prompts


@dataclass(frozen=True, slots=True)
class Workload:
    """The models and prompts of a configuration, to be decoded one by one (without trace) under
    changed sections.
    """

    cfg: Mapping[str, Any]
    options: ProfilingOptions
    pair: ModelPair
    prompts: Sequence[TokenPrompt]
    progress: Progress

    @staticmethod
    def of(cfg: Mapping[str, Any], progress: Progress) -> Workload:
        pair, prompts = load(cfg, progress)
        return Workload(cfg, ProfilingOptions(**cfg["profiling"]), pair, prompts, progress)

    @property
    def stages(self) -> int:
        return int(self.cfg["executor"]["stages"])

    def decode(
        self, policy: Mapping[str, Any], executor: Mapping[str, Any], clock: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Decodes all prompts with these sections, on a measured clock the first one once more
        before, and returns the summary.
        """
        sections = {"policy": policy, "executor": {**self.cfg["executor"], **executor}}
        cfg = {**self.cfg, **sections, "clock": clock, "batch_size": 1, "trace": False}
        runner = PartsRunner(cfg=cfg, pair=self.pair, stop=stop_rules(cfg, self.pair))
        results: list[RequestResult] = []
        try:
            if clock["kind"] == "measured":
                runner.run(self.prompts[:1], lambda _: None)
            with timed_run():
                totals = [runner.run([prompt], results.append) for prompt in self.prompts]
        finally:
            runner.close()
        summary = summarise(results, RunTotals.merge(totals))
        by_level = policy.get("levels_per_step") == 1
        if not summary["tbt_ms_mean"] or (by_level and summary["hit_rate"] is None):
            raise UserError(
                f"max_new_tokens={cfg['max_new_tokens']} is too few for a measurement: raise it"
            )
        self.progress.advance()
        return summary


def clock_node(name: str, costs: Mapping[str, Any], note: str = "") -> dict[str, Any]:
    return {"kind": "simulated", "profile": name, "scale": 1.0, "note": note, "costs": costs}


def as_yaml(node: Mapping[str, Any]) -> str:
    return yaml.safe_dump(node, sort_keys=False, default_flow_style=None, width=1e9)


def curve_on(degrees: Mapping[str, Any], kind: str, devices: int) -> dict[str, Any] | None:
    curves = degrees.get(kind, {})
    known = [int(number) for number in curves]
    covered = known and min(known) <= devices <= max(known)
    return curve_at(curves, devices) if covered else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    stages: tuple[float, ...]  # compute, pruning and transfer; the last includes the output head
    compute: float  # of the longest stage for a tree level, C max T_c
    transfer: float  # of one tree level
    draft: float  # a pass over one tree level

    @staticmethod
    def of(profile: LatencyProfile, *, width: int, stages: int, group: int = 1) -> StepTimes:
        """Reads the times from a profile of one device at a tree width; a ``group`` of devices
        works in sequence within a step (PipeDec's G).
        """
        transfer = profile.ms(Work.TRANSFER, width)
        compute = group * profile.ms(Work.STAGE, width) + (group - 1) * transfer
        plain = compute + profile.ms(Work.PRUNE, width) + transfer
        return StepTimes(
            stages=(*[plain] * (stages - 1), plain + profile.ms(Work.HEAD, width)),
            compute=compute,
            transfer=transfer,
            draft=profile.ms(Work.DRAFT, width),
        )


def eq1_tbt(stages: Sequence[float], hit: float) -> float:
    """SpecPipe Eq. 1 (reconstructed): max_i T_i + (1 - p) times the sum over the other stages."""
    longest = max(stages)
    return longest + (1.0 - hit) * (sum(stages) - longest)


def eq2_tbt(step: float, num_stages: int, hit: float) -> float:
    """SpecPipe Eq. 2 (reconstructed), for equal stages: T (1 + (1 - p) (N - 1))."""
    return step * (1.0 + (1.0 - hit) * (num_stages - 1))


def pipedec_latency(times: StepTimes) -> float:
    """PipeDec 2.4: max(T_draft, C max T_c + max T_t) with C = T_c(w) / T_c(1), without misses."""
    return max(times.draft, times.compute + times.transfer)


def propose(work: Workload, clock: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Simulates SpecPipe on ``clock``, a profile of one device: every width with every number of
    children has one device per stage; the fastest tree is tried in every grouping.
    """
    options, devices = work.options, work.stages
    wrong = [g for g in options.groups if devices % g]
    if wrong:
        raise UserError(
            f"profiling.groups={options.groups}: {wrong[0]} does not divide the"
            f" executor.stages={devices} devices; name divisors of {devices}"
        )
    trees, groups = (
        [*product(options.widths, options.children)],
        [g for g in options.groups if g > 1],
    )
    work.progress.phase("simulating trees", len(trees) + len(groups))
    cells = [_cell(work, clock, *tree, 1) for tree in trees]
    best = min(cells, key=lambda cell: cell["tbt"])
    more = [_cell(work, clock, best["width"], best["children"], group) for group in groups]
    return cells + more


def _cell(
    work: Workload, clock: Mapping[str, Any], width: int, children: int, group: int
) -> dict[str, Any]:
    """Returns the simulated milliseconds between tokens (tbt) and the equations' estimates of it,
    of which SpecPipe's take the simulated hit rate as p.
    """
    stages = work.stages // group
    tree = {"width": width, "children": children}
    # The simulated clock needs all stages in one process.
    executor = {"stages": stages, "groups": None if group == 1 else [group] * stages}
    summary = work.decode(
        {"_target_": "specdec.policies.FixedWidth", **tree, "levels_per_step": 1},
        {**executor, "transport": "in_process"},
        clock,
    )
    hit_rate, tbt = summary["hit_rate"], summary["tbt_ms_mean"]
    times = StepTimes.of(build_profile(clock), width=width, stages=stages, group=group)
    estimates = {
        "eq1": eq1_tbt(times.stages, hit_rate),
        "eq2": eq2_tbt(max(times.stages), stages, hit_rate),
        "pipedec": pipedec_latency(times),
    }
    return {
        **{**tree, "stages": stages, "group": group, "hit_rate": hit_rate},
        **{"steps_per_token": summary["steps_per_token"], "tbt": tbt, **estimates},
        "draft_bound": times.draft > times.compute,
        **{f"{name}_error": value / tbt - 1.0 for name, value in estimates.items()},
    }


def allocate(work: Workload, use: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Decodes all prompts with every combination of split and tree (SwiftSpec 3.1 and 5.5).

    On the latency profile ``use``, each tree is simulated with d = floor(target time / draft time)
    and with d + 1. Without it, decoding runs on real ranks, timed by the wall clock, with as many
    draft expansions as fit into a target pass.
    """
    options, devices = work.options, work.options.devices or 0
    wrong = [target for target in options.targets if target >= devices]
    if wrong:
        raise UserError(
            f"profiling.targets={options.targets}: {wrong[0]} of profiling.devices={devices}"
            f" devices leaves none for the draft: name numbers from 1 to {devices - 1}"
        )
    tried, splits = [*product(options.targets, options.bs, options.w)], []
    work.progress.phase("trying splits", len(tried) * (1 if use is None else 2))
    for target, bs, w in tried:
        draft = devices - target
        executor: dict[str, Any] = {"stages": 1, "groups": None, "shared": False}
        executor |= {"target_degree": target, "draft_degree": draft, "transport": "distributed"}
        clock: dict[str, Any] = {"kind": "measured"}
        depths: list[int | str] = [UNTIL_READY]
        interpolated, target_ms, draft_ms = False, None, None
        if use is not None:
            clock, interpolated = _split_clock(use, target, draft)
            profile = build_profile(clock)
            target_ms, draft_ms = profile.ms(Work.STAGE, bs), profile.ms(Work.DRAFT, w)
            ratio = max(1, int(target_ms / draft_ms))
            depths = [ratio, ratio + 1]
            executor["transport"] = "in_process"
        for d in depths:
            tree: dict[str, Any] = {"bs": bs, "w": w, "d": d}
            policy = {"_target_": "specdec.policies.BestFirst", **tree, "asynchronous": True}
            summary = work.decode(policy, executor, clock)
            split = {"target": target, "draft": draft, **tree, "target_ms": target_ms}
            split |= {"draft_ms": draft_ms, "interpolated": interpolated}
            keys = ("acceptance_length", "tokens_per_s")
            splits.append(split | {key: summary[key] for key in keys})
    return splits


def _split_clock(use: Mapping[str, Any], target: int, draft: int) -> tuple[dict[str, Any], bool]:
    costs, degrees, interpolated = dict(use["costs"]), use.get("degrees") or {}, False
    for kind, devices in (("stage", target), ("draft", draft)):
        known = sorted(int(number) for number in degrees.get(kind, ()))
        curve = curve_on(degrees, kind, devices)
        if curve is None:
            has = f"it has {known[0]} to {known[-1]}" if known else "it has none by degree"
            raise UserError(
                f"profiling.use={use['name']} has no time of a {kind} pass on {devices} devices"
                f" ({has}): choose other profiling.targets, or a profile with `degrees`, such as"
                " swiftspec_table1"
            )
        costs[kind] = curve
        interpolated = interpolated or devices not in known
    return clock_node(use["name"], costs, use.get("note", "")), interpolated
