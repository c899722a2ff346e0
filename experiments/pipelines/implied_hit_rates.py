"""Hit rates and acceptance lengths implied by the papers' ratios, beside those of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.pipelines.accuracy import quality_overrides
from experiments.pipelines.theory import needed_acceptance_length
from experiments.pipelines.token_times import run_rows
from experiments.reproduce.drafts import Draft, drafts, size_overrides
from experiments.reproduce.drawing import figure, legend, styles, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.intervals import hits_of, interval, lengths_of, share
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome
from specdec.clocks.build import build_profile

_NEEDED = (
    *("stated", "SpecPipe TBT ms", "SpecInfer TBT ms"),
    *("hit rate needed", "acceptance length needed"),
)
_HAD = (
    *("draft", "hit rate", "acceptance length", "SpecPipe TBT ms"),
    *("SpecInfer TBT ms", "ratio", "loop_share"),
)


def implied_pairs(item: Item, lab: Lab) -> Findings:
    """(hit rate, acceptance length) that the stated ratios imply, beside what drafts have.

    Keys: ``common``, ``dynamic``, ``static``, ``drafts``, ``easy``, ``over_plain`` and
    ``over_static`` ([least, most], the paper's), ``best`` (its best cell, ms: plain, static,
    dynamic), claims ``hit`` and ``length``.
    """
    findings, config = Findings(), item.config
    size = size_overrides(item, lab)
    sweep = [
        Draft(f"easy {e}", f"synthetic, {e:.0%} easy", f"{e:.0%}", (*quality_overrides(e), *size))
        for e in config["easy"]
    ]
    points = []
    for draft in [*drafts(config["drafts"], item, lab, findings), *sweep]:
        rows = run_rows(
            lab, draft, config["common"], {"d": config["dynamic"], "s": config["static"]}
        )
        points.append((draft, rows["d"], rows["s"]))
    profile = build_profile(points[0][1].config["clock"])
    stages = int(points[0][1].config["executor"]["stages"])
    swept = points[-len(sweep) :]
    hits = [d.summary["hit_rate"] for _, d, _ in swept]
    ms = [d.tbt_ms for _, d, _ in swept]
    nodes = points[0][2].summary["rows_per_target_pass"]
    implied = []
    for name, dynamic_ms, static_ms in _stated_times(config):
        hit = (
            float(np.interp(-dynamic_ms, [-m for m in ms], hits)) if dynamic_ms >= min(ms) else None
        )
        length = needed_acceptance_length(static_ms, nodes, stages, profile)
        implied.append((name, dynamic_ms, static_ms, hit, length))
    findings.table("What would have to be true", _NEEDED, implied)
    findings.table("What drafts have", _HAD, tuple(_had(*point) for point in points))
    for draft, d, s in points[: len(points) - len(sweep)]:
        for claim, value, counts in (
            (config["hit"], d.summary["hit_rate"], hits_of(d.results)),
            (config["length"], s.summary["acceptance_length"], lengths_of(s.results)),
        ):
            draft.add(findings, claim, value, run=d, interval=interval(counts, share))
    findings.notes.append(_pairs_note(implied[0], swept))
    findings.figure = _pairs_figure(item, points, swept, implied)
    return findings


def _had(draft: Draft, dynamic: Outcome, static: Outcome) -> tuple[Any, ...]:
    d, s = dynamic.summary, static.summary
    return (
        *(draft.title, d["hit_rate"], s["acceptance_length"], dynamic.tbt_ms, static.tbt_ms),
        *(static.tbt_ms / dynamic.tbt_ms, d["loop_share"]),
    )


def _stated_times(config: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """The best cell's own times, then the ends of the ratio ranges over its plain time."""
    plain, static, dynamic = config["best"]
    pairs = [("best cell, HumanEval-X", dynamic, static)]
    for over_plain in config["over_plain"]:
        for over_static in config["over_static"]:
            ms = plain / over_plain
            pairs.append(
                (f"{over_plain}x over PP, {over_static}x over SpecInfer", ms, ms * over_static)
            )
    return pairs


def _pairs_note(best: tuple[Any, ...], swept: Sequence[tuple[Draft, Outcome, Outcome]]) -> str:
    _, _, _, hit, length = best
    lengths = [s.summary["acceptance_length"] for _, _, s in swept]
    hits = [d.summary["hit_rate"] for _, d, _ in swept]
    if hit is None:
        return (
            f"The best cell needs a hit rate above {max(hits):.3f}, the best of the sweep, where"
            f" SpecInfer's tree has {max(lengths):.2f} tokens per pass already; the stated ratio"
            f" leaves it {length:.2f}."
        )
    there = float(np.interp(hit, hits, lengths))
    return (
        f"The best cell needs a hit rate of {hit:.3f}; synthetic drafts of that hit rate give"
        f" SpecInfer's tree {there:.2f} tokens per pass, the stated ratio leaves it {length:.2f}."
    )


def _place(point: tuple[Draft, Outcome, Outcome]) -> tuple[float, float]:
    """Hit rate of the dynamic tree and acceptance length of the static one."""
    _, dynamic, static = point
    return dynamic.summary["hit_rate"], static.summary["acceptance_length"]


def _pairs_figure(item: Item, points: Any, swept: Any, implied: Sequence[tuple[Any, ...]]) -> Any:
    fig, (ax,) = figure(7.8, 5.0)
    xs, ys = zip(*map(_place, swept), strict=True)
    label = "synthetic drafts of rising quality"
    ax.plot(xs, ys, marker="o", ms=3, color="#333333", label=label)
    shown = points[: len(points) - len(swept)]
    looks = styles([draft.short for draft, _, _ in shown])
    for i, point in enumerate(shown):
        look = {"marker": "s^Dv*P"[i % 6], "ms": 7, "color": looks[point[0].short].color}
        ax.plot(*_place(point), lw=0, label=point[0].short, **look)
    known = [(hit, length) for *_, hit, length in implied[1:] if hit is not None]
    if known:
        xs, ys = zip(*known, strict=True)
        label = "implied by the stated ranges"
        ax.fill_between([min(xs), max(xs)], min(ys), max(ys), color="#f2d7a6", label=label)
    _, _, _, hit, length = implied[0]
    if hit is not None:
        look = {"marker": "X", "ms": 10, "color": "#c9982e"}
        ax.plot(hit, length, lw=0, label="implied by the best cell", **look)
    y = "acceptance length of the static tree"
    tidy(ax, x="hit rate of the dynamic tree", y=y, title=item.stated.title)
    legend(ax)
    return fig
