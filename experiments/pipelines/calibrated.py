"""SpecPipe beside SpecInfer with calibrated laws, over the band that the stated times leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.pipelines.theory import needed_acceptance_length
from experiments.pipelines.token_times import run_rows
from experiments.reproduce.drafts import Draft, drafts
from experiments.reproduce.drawing import figure, legend, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio
from specdec.clocks.build import build_profile
from specdec.clocks.interface import Work

_HAD = (
    *("draft", "profile", "hit rate", "tokens per tree", "SpecPipe ms", "SpecInfer ms, by rule"),
    *("over SpecInfer", "low", "high", "ms, hidden", "over hidden", "ms, serial", "over serial"),
    "over PP",
)
_NEEDED = (
    *("stated", "profile", "step ms", "SpecPipe ms", "SpecInfer ms"),
    *("hit rate needed (Eq. 2)", "tokens per tree needed"),
)


def calibrated(item: Item, lab: Lab) -> Findings:
    """(hit rate, tokens per tree, step time) that the stated ratios need, and those of real pairs.

    Keys: ``drafts``, ``common``, ``profiles`` (name -> profile), ``rows`` (plain, dynamic, and
    SpecInfer by rule, hidden, serial: overrides), ``nodes`` of a step and of SpecInfer's tree,
    ``stated`` (name -> ms of PP, SpecInfer and SpecPipe), claims ``over_specinfer``, ``over_pp``.
    """
    findings, config = Findings(), item.config
    table, needed = [], []
    points: dict[str, list[tuple[float, float]]] = {}
    profiles = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        for name, profile in config["profiles"].items():
            common = [*config["common"], f"clock.profile={profile}"]
            runs = run_rows(lab, draft, common, config["rows"])
            profiles[name] = build_profile(runs["dynamic"].config["clock"])
            row, ratio = _had(draft, name, runs)
            table.append(row)
            points.setdefault(draft.short, []).append((row[2], ratio))
            for slow in list(runs)[2:] + ["plain"]:
                value, *ends = speed_ratio(runs["dynamic"], runs[slow])
                claim = "over_pp" if slow == "plain" else "over_specinfer"
                kind = "what-if" if slow in ("hidden", "serial") else "calibrated"
                text = f"stages {name}, over {slow}"
                draft.add(findings, claim, value, text, interval=(ends[0], ends[1]), kind=kind)
    for name, (_, static_ms, dynamic_ms) in config["stated"].items():
        for kind, profile in profiles.items():
            kinds = (Work.STAGE, Work.TRANSFER, Work.PRUNE)  # a step of a full pipeline
            step = float(sum(profile.ms(work, config["nodes"]["step"]) for work in kinds))
            stages = config["stages"]
            hit = 1.0 - (dynamic_ms / step - 1.0) / (stages - 1)
            tree = needed_acceptance_length(static_ms, config["nodes"]["tree"], stages, profile)
            shown = hit if hit <= 1.0 else None
            needed.append((name, kind, step, dynamic_ms, static_ms, shown, tree))
    findings.table("What the stated times need", _NEEDED, needed)
    findings.table("What measured pairs have", _HAD, table)
    findings.figure = _picture(item, points)
    return findings


def _had(draft: Draft, profile: str, runs: Mapping[str, Outcome]) -> tuple[tuple[Any, ...], float]:
    """The line of a draft on a profile, and its ratio over SpecInfer that drafts by rule."""
    plain, dynamic, rule, hidden, serial = runs.values()
    ratio, low, high = speed_ratio(dynamic, rule)
    ms = dynamic.tbt_ms
    return (
        *(draft.title, profile, dynamic.summary["hit_rate"], rule.summary["acceptance_length"], ms),
        *(rule.tbt_ms, ratio, low, high, hidden.tbt_ms, hidden.tbt_ms / ms),
        *(serial.tbt_ms, serial.tbt_ms / ms, plain.tbt_ms / ms),
    ), ratio


def _picture(item: Item, points: Mapping[str, list[tuple[float, float]]]) -> Any:
    fig, (ax,) = figure(7.8, 4.6)
    low, high = item.config["ratio"]
    ax.axhspan(low, high, alpha=0.2, label="stated")
    for name, pairs in points.items():
        ax.plot(*zip(*pairs, strict=True), marker="o", label=name)
    y = "SpecPipe over SpecInfer, drafting by rule"
    tidy(ax, x="hit rate of SpecPipe", y=y, title=item.stated.title)
    legend(ax)
    return fig
