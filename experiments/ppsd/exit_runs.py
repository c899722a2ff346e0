"""Runs of the early-exit presets on the bundled target, for comparison with PPSD's equations.

All are simulated: values of the bundled target, times of a profile with equal stages on which
transfers and exit heads cost nothing, as in Eq. 3 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.ppsd.laws import eq5_acceptance, free_costs_ms, walk_ms
from experiments.reproduce.drafts import SIMULATED, size_overrides
from experiments.reproduce.findings import Findings, surely
from experiments.reproduce.intervals import Interval, interval, share
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio
from experiments.reproduce.profiles import write_profile
from specdec.clocks import Work
from specdec.clocks.build import build_profile
from specdec.metrics.rates import judged

_LAYERS = 24  # of the bundled target


@dataclass(frozen=True, slots=True)
class ExitRun:
    """An early-exit strategy and plain decoding on one pipeline."""

    exit_layer: int
    stages: int
    plain: Outcome
    run: Outcome

    @property
    def speedup(self) -> tuple[float, float | None, float | None]:
        return speed_ratio(self.run, self.plain)

    @property
    def alpha(self) -> float:
        return float(self.run.summary["acceptance_rate_verified"])

    @property
    def alpha_interval(self) -> Interval:
        return interval([judged(r.counters, self.run.totals) for r in self.run.results], share)

    @property
    def law(self) -> float:
        return float(self.run.summary["speedup_law"])

    @property
    def loops(self) -> float | None:
        return self.run.summary["loop_share"]  # type: ignore[no-any-return]


def exit_run(
    item: Item,
    lab: Lab,
    exit_layer: int,
    *,
    pass_ms: float,
    transfer_ms: float = 0.0,
    overrides: Sequence[str] = (),
    head: str | None = None,
    strategy: Sequence[str] = ("strategy=ppsd",),
) -> ExitRun:
    """Runs a strategy and plain decoding on ceil(layers / exit_layer) equal stages.

    Args:
        pass_ms, transfer_ms: times of a target pass, and of a transfer between two stages.
        overrides: further overrides of both, e.g. data and sampling.
        head: kind of head (default: transformer if the layer has one).
    """
    stages = -(-_LAYERS // exit_layer)
    profile = write_profile(
        lab.folder, target_ms=pass_ms, stages=stages, draft_ms=0.0, transfer_ms=transfer_ms
    )
    common = ["model=tiny", *_common(item, lab, stages, profile, overrides)]
    plain = lab.run(["strategy=ar", "executor=pipeline", *common])
    head = head or ("norm" if exit_layer == _LAYERS // 2 else "transformer")
    chosen = [f"model.exit_layer={exit_layer}", f"model.exit_head={head}"]
    return ExitRun(exit_layer, stages, plain, lab.run([*strategy, *common, *chosen]))


def _common(
    item: Item, lab: Lab, stages: int, profile: Path | str, overrides: Sequence[str]
) -> list[str]:
    return [
        *(SIMULATED, f"clock.profile={profile}", f"executor.stages={stages}"),
        *(*size_overrides(item, lab), "threads=1", "serving.first_fill=alone", *overrides),
    ]


def add_runs(
    item: Item, lab: Lab, findings: Findings, config: Mapping[str, Any]
) -> list[tuple[float, float]]:
    """PPSD on the bundled target: acceptance, speed-up, and Eq. 6 beside it.

    Returns (Eq. 6, speed-up) of each run.

    Keys: ``data`` (name -> overrides), ``pass_ms``, ``heads`` ([kind, exit layer]);
    ``claim`` (each run follows Eq. 6 within 5 per cent), ``best`` (claim -> [kind, exit that is
    fastest]), ``lower`` (norm heads are accepted less often at equal exits).
    """
    rows = []
    runs: dict[tuple[str, int], list[ExitRun]] = {}
    for name, overrides in config["data"].items():
        for kind, layer in config["heads"]:
            size = {"pass_ms": config["pass_ms"], "overrides": overrides}
            outcome = exit_run(item, lab, layer, head=kind, **size)
            runs.setdefault((kind, layer), []).append(outcome)
            ratio, low, high = outcome.speedup
            off = ratio / outcome.law
            law = (ratio, low, high, outcome.law, off, outcome.loops)
            exit_share = f"{layer}/{_LAYERS}"
            rows.append((name, kind, exit_share, outcome.alpha, *outcome.alpha_interval, *law))
            if "claim" in config:
                text = f"bundled target, {name}, {kind} head, E = {exit_share}: {ratio:.2f}x, Eq. 6"
                text += f" {outcome.law:.2f}x"
                follows = abs(off - 1) <= 0.05
                findings.add(config["claim"], follows, "simulated", text, loops=outcome.loops)
    columns = (
        *("data", "head", "E / N", "alpha", "95 % from", "to", "speed-up", "95 % from", "to"),
        *("Eq. 6", "run / law", "loop_share"),
    )
    title = "PPSD on the bundled target, transfers and heads at no cost (simulated)"
    findings.table(title, columns, rows)
    speedups = {key: fmean(run.speedup[0] for run in same) for key, same in runs.items()}
    for claim, (kind, claimed) in config.get("best", {}).items():
        means = {layer: mean for (name, layer), mean in speedups.items() if name == kind}
        best = max(means, key=means.__getitem__)
        text = "bundled target, " + ", ".join(f"E={e}/24: {m:.2f}x" for e, m in means.items())
        findings.add(claim, best == claimed, "simulated", text, loops=runs[kind, best][0].loops)
    if "lower" in config:
        alphas = {key: fmean(run.alpha for run in same) for key, same in runs.items()}
        pairs = {
            layer: (alpha, alphas["transformer", layer])
            for (kind, layer), alpha in alphas.items()
            if kind == "norm" and ("transformer", layer) in alphas
        }
        text = ", ".join(f"E={e}/24: {a:.2f} against {b:.2f}" for e, (a, b) in pairs.items())
        less, loops = (
            all(a < b for a, b in pairs.values()),
            runs["norm", next(iter(pairs))][0].loops,
        )
        findings.add(config["lower"], less, "simulated", f"bundled target, {text}", loops=loops)
    return [(outcome.law, outcome.speedup[0]) for same in runs.values() for outcome in same]


Curve = tuple[list[float], list[float]]


def draft_length_runs(
    item: Item, lab: Lab, findings: Findings, config: Mapping[str, Any]
) -> tuple[Curve, Curve]:
    """EESD over draft lengths; returns its acceptance and its speed-up.

    Keys: ``data`` (overrides), ``pass_ms``, ``exit_layer``, ``gammas``; claims ``falls``,
    ``peaks``.
    """
    rows, gammas = [], [int(gamma) for gamma in config["gammas"]]
    for gamma in gammas:
        strategy = ["strategy=eesd", "executor=early_exit", f"policy.gamma={gamma}"]
        size = {"pass_ms": config["pass_ms"], "overrides": config["data"]}
        outcome = exit_run(item, lab, config["exit_layer"], strategy=strategy, **size)
        ratio, low, high = outcome.speedup
        overall = float(outcome.run.summary["acceptance_rate"])
        law = eq5_acceptance(outcome.alpha, gamma)
        rows.append(
            (gamma, outcome.alpha, overall, law, ratio, low, high, outcome.law, outcome.loops)
        )
    columns = (
        *("draft length", "alpha", "overall acceptance", "Eq. 5", "speed-up", "95 % from", "to"),
        *("Eq. 4", "loop_share"),
    )
    title = f"EESD on the bundled target, E = {config['exit_layer']} of {_LAYERS} (simulated)"
    findings.table(title, columns, rows)
    rates, speeds = [row[2] for row in rows], [row[4] for row in rows]
    top = speeds.index(max(speeds))
    falls = all(b < a for a, b in pairwise(rates))
    where, loops = "EESD, bundled target;", rows[0][-1]
    text = f"{where} {rates[0]:.2f} to {rates[-1]:.2f}"
    findings.add("falls", falls, "simulated", text, loops=loops)
    text = f"{where} peak of {speeds[top]:.2f}x at a draft length of {gammas[top]}"
    findings.add("peaks", 0 < top < len(speeds) - 1, "simulated", text, loops=loops)
    xs = [float(gamma) for gamma in gammas]
    return (xs, rates), (xs, speeds)


def rival_runs(item: Item, lab: Lab, findings: Findings, config: Mapping[str, Any]) -> None:
    """Table 2's methods on one target and its heads, with equal stages for every row (simulated).

    Medusa submits its whole tree to the pipeline at once. Keys: ``target`` (its name), ``kind`` (of
    the verdicts), ``model`` (overrides), ``stages``, ``rows`` (name -> overrides), ``data`` (name
    -> overrides), ``pass_ms``, ``paid`` (a profile that prices heads and output matrices),
    ``faster`` (claim -> [row, other]), ``over_plain`` (claim -> row).
    """
    target, stages, kind = config["target"], config["stages"], config["kind"]
    free = write_profile(
        lab.folder, target_ms=config["pass_ms"], stages=stages, draft_ms=0.0, transfer_ms=0.0
    )
    profiles = {"heads at no cost": free, "heads paid": config["paid"]}
    table, laws = [], []
    for (name, overrides), (label, profile) in product(config["data"].items(), profiles.items()):
        common = [*config["model"], *_common(item, lab, stages, profile, overrides)]
        plain = lab.run(["strategy=ar", "executor=pipeline", *common])
        runs = {row: lab.run([*chosen, *common]) for row, chosen in config["rows"].items()}
        for row, run in runs.items():
            s = run.summary
            per_answer = s["new_tokens"] / s["answers"]
            cells = (s["acceptance_rate_verified"], per_answer, *speed_ratio(run, plain))
            table.append((name, label, row, *cells, s["loop_share"]))
            if row == "PPSD":
                ratio, law, form = cells[2], s["speedup_law"], _closed_form(run, stages, cells[0])
                laws.append((name, label, cells[0], ratio, law, ratio / law, form, ratio / form))
        where = f"{target}, {name}, {label}"
        for claim, ours in config.get("over_plain", {}).items():
            ratio, *ends = speed_ratio(runs[ours], plain)
            loops = runs[ours].summary["loop_share"]
            found = {"kind": kind, "loops": loops, "interval": tuple(ends)}
            findings.add(claim, ratio, "simulated", where, **found)
        for claim, (ours, other) in config["faster"].items():
            ratio, low, high = speed_ratio(runs[ours], runs[other])
            ends = "" if low is None or high is None else f" ({low:.2f}-{high:.2f})"
            loops = runs[ours].summary["loop_share"]
            text = f"{where}: {ratio:.2f}x{ends}"
            findings.add(claim, surely(low, high), "simulated", text, kind=kind, loops=loops)
    columns = (
        *("data", "profile", "row", "accepted / judged", "tokens per answer", "speed-up"),
        *("95 % from", "to", "loop_share"),
    )
    title = f"On {target}, {stages} stages for every row (simulated)"
    findings.table(title, columns, table)
    columns = (
        *("data", "profile", "alpha", "speed-up", "Eq. 6", "run / Eq. 6"),
        *("closed form", "run / closed form"),
    )
    findings.table("PPSD, free running, against Eq. 6 and its closed form", columns, laws)


def _closed_form(run: Outcome, stages: int, alpha: float) -> float:
    """PPSD's speed-up where ranks run free, by the prices of the run's profile."""
    profile, s = build_profile(run.config["clock"]), run.summary
    kinds = (Work.STAGE, Work.EXIT, Work.HEAD, Work.TRANSFER)
    stage, leave, output, transfer = (profile.ms(kind, 1) for kind in kinds)
    accepted, rejected = free_costs_ms(stages, stage, leave, output, transfer)
    later = s["new_tokens"] / s["num_prompts"] - 2  # the second token passes alone
    spent = rejected + later * (alpha * accepted + (1 - alpha) * rejected)
    return walk_ms(stages, stage, output, transfer) * (later + 1) / spent
