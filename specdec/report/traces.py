"""Pictures of a trace: the timeline of all ranks, and why draft tokens were rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specdec.report.plots import BAD, figure_of, png, tidy
from specdec.trace.recorder import Judgement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS: Mapping[str, str] = {
    "compute": "#2f6db3",
    "draft": "#7fb069",
    "prune": "#d1495b",
    "transmit": "#edae49",
    "wait": "#e9e9e9",
}
"""Phase -> colour. Drafting, also compute, has another colour, as it runs beside the stages."""

_WIDE_STEPS, _NEAR_STEPS = 90, 9
_MAX_BARS = 20_000  # more bars could not be distinguished

REASONS = {  # whether the target's token was accepted, and why not -> the metric of its share
    "accepted: in the tree": "share_accepted",
    "a candidate of the draft that the tree had no room for": "share_no_room",
    "not among the draft's candidates": "share_not_a_candidate",
    "the draft had not proposed anything there": "share_no_proposal",
}
_ACCEPTED, _NO_ROOM, _NO_CANDIDATE, _NO_PROPOSAL = REASONS
_EDGES = {1: "1", 2: "2", 4: "3-4", 8: "5-8", 16: "9-16", 32: "17-32"}  # last rank -> its bin
RANKS = (*_EDGES.values(), "33+", "none")
"""Bins of the draft's rank of the target's token; none: the token was not a candidate."""

_BLUE, _PALE = "#0070a8", "#b9d6e8"


def timeline_png(
    trace: Mapping[str, Any],
    *,
    steps: tuple[int, int] | None = None,
    commits: Mapping[int, str] | None = None,
    title: str = "Timeline of all ranks",
) -> bytes:
    """Plots the work of each rank over time (SpecPipe Fig. 12): ``steps`` (default: the first 90)
    on the left, a few of them on the right. Misses in ``commits`` (step -> "hit" or "miss") are
    marked; the right panel shows one, if there is any. ValueError if no rank worked in ``steps``.
    """
    bars = _bars_of(trace)
    worked = bars.loc[bars["tokens"] > 0, "step"]
    first, last = (int(worked.min()), int(bars["step"].max())) if len(worked) else (0, 0)
    wide = (first, min(last, first + _WIDE_STEPS - 1)) if steps is None else steps
    if not worked.between(*wide).any():
        raise ValueError(f"no rank worked in steps {wide[0]} to {wide[1]} (the last is {last})")
    wide = wide[0], min(wide[1], last)
    misses = [step for step, kind in (commits or {}).items() if kind == "miss"]
    names = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    labels = {e["tid"]: e["args"]["name"] for e in sorted(names, key=lambda e: e["tid"])}
    figure = figure_of(15.0, 2.1 + 0.42 * len(labels), dpi=160)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1.0])
    for ax, (first, last) in ((left, wide), (right, _detail(wide, misses))):
        _panel(ax, bars, (first, last), misses)
        ax.set_xlabel(f"{trace['otherData']['clock']} time (ms)")
        ax.set_title(f"steps {first} to {last}", fontsize=9)
    left.set_yticks([*labels], [*labels.values()], fontsize=8)
    left.set_ylim(max(labels) + 0.6, min(labels) - 0.6)
    left.set_ylabel("rank")
    return png(figure, title, legend=(left, right))


def _bars_of(trace: Mapping[str, Any]) -> pd.DataFrame:
    rows = [
        {
            "rank": event["tid"],
            "phase": "draft" if event["name"] == "draft" else event["cat"],
            "start": event["ts"] / 1e3,
            "ms": event["dur"] / 1e3,
            "step": event["args"]["step"],
            "tokens": event["args"].get("tokens", 0),
        }
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]
    bars = pd.DataFrame(rows, columns=["rank", "phase", "start", "ms", "step", "tokens"])
    return bars.sort_values(["start", "rank"], kind="stable")


def _detail(wide: tuple[int, int], misses: list[int]) -> tuple[int, int]:
    first, last = wide
    half = _NEAR_STEPS // 2
    misses = sorted(step for step in misses if first < step < last)
    inside = [step for step in misses if first + half <= step <= last - half]
    middle = (inside or misses or [(first + last) // 2])[0]
    start = max(first, min(middle - half, last - _NEAR_STEPS + 1))
    return start, min(last, start + _NEAR_STEPS - 1)


def _panel(ax: Axes, bars: pd.DataFrame, steps: tuple[int, int], misses: list[int]) -> None:
    work = bars[(bars["tokens"] > 0) & bars["step"].between(*steps)]
    if work.empty:
        return
    start, end = work["start"].min(), (work["start"] + work["ms"]).max()
    shown = bars[(bars["start"] < end) & (bars["start"] + bars["ms"] > start)][:_MAX_BARS]
    detailed = steps[1] - steps[0] < 2 * _NEAR_STEPS
    edge = {"edgecolor": "white", "linewidth": 0.4} if detailed else {"linewidth": 0}
    for (phase, rank), own in shown.groupby(["phase", "rank"]):
        spans = own[["start", "ms"]].to_numpy()
        label = {"compute": "compute (number: tokens)"}.get(phase, phase)
        ax.broken_barh(spans, (rank - 0.4, 0.8), facecolors=_COLORS[phase], label=label, **edge)
    if detailed:
        large = work[work["phase"].isin(["compute", "draft"]) & (work["ms"] > 0.04 * (end - start))]
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": "w"}
        for bar in large.itertuples():
            ax.text(bar.start + bar.ms / 2, bar.rank, str(bar.tokens), **style)
    ends = (work["start"] + work["ms"]).groupby(work["step"]).max()
    for at in ends[ends.index.isin(misses)]:
        line: dict[str, Any] = {"color": _COLORS["prune"], "lw": 0.8, "ls": ":", "zorder": 3}
        ax.axvline(at, label="miss: the tree is discarded", **line)
    ax.set_xlim(start, end)
    ax.spines[["top", "right"]].set_visible(False)


def judgements(trees: Mapping[str, Any]) -> pd.DataFrame:
    """Returns a row per decided token: fields of ``Judgement``, ``reason``, and ``bin`` of rank."""
    steps = (step for request in trees["requests"] for step in request["steps"])
    rows = [row for step in steps for row in (step["commit"] or {}).get("judged", ())]
    table = pd.DataFrame(rows, columns=[*Judgement._fields])
    cases = [table["in_tree"] == True, table["candidates"] == 0, table["rank"] == 0]  # noqa: E712
    table["reason"] = np.select(cases, [_ACCEPTED, _NO_PROPOSAL, _NO_CANDIDATE], _NO_ROOM)
    ranks = table["rank"].astype(float).replace(0, np.inf)
    edges = [0.0, *_EDGES, np.finfo(float).max, np.inf]
    return table.assign(bin=pd.cut(ranks, edges, labels=list(RANKS)))


def rejection_metrics(trees: Mapping[str, Any]) -> dict[str, float]:
    """Returns the share of each reason, and mean probabilities of rejected top candidates."""
    table = judgements(trees)
    if table.empty:
        return {}
    shares = table["reason"].value_counts(normalize=True).reindex([*REASONS], fill_value=0.0)
    rejected = table[(table["candidates"] > 0) & (table["reason"] != _ACCEPTED)]
    means = rejected[["top_target_prob", "top_prob"]].astype(float).mean()
    means.index = pd.Index(["target_prob_of_rejected", "draft_prob_of_rejected"])
    return pd.concat([shares.rename(REASONS), means]).dropna().to_dict()


def rejections_png(trees: Mapping[str, Any], *, title: str) -> bytes | None:
    table = judgements(trees)
    if table.empty:
        return None
    figure = figure_of(13.0, 3.9)
    ranks, reasons = figure.subplots(1, 2)
    proposed = table[table["candidates"] > 0]
    counts = pd.crosstab(proposed["bin"], proposed["in_tree"].astype(bool), dropna=False)
    counts = counts.reindex(index=list(RANKS), columns=[True, False], fill_value=0)
    ranks.bar(RANKS, counts[True], color=_BLUE, label="in the tree: accepted")
    ranks.bar(RANKS, counts[False], bottom=counts[True], color=_PALE, label="not in the tree")
    ranks.legend(fontsize=8, frameon=False)
    ranks.set_ylim(0, 1.08 * max(1, counts.sum(axis=1).max()))  # margins may end at an empty bar
    tidy(ranks, xlabel="the draft's rank of the target's token", ylabel="tokens")
    numbers = table["reason"].value_counts().reindex([*REASONS]).dropna()
    labels = [reason.replace(" that the ", "\nthat the ") for reason in numbers.index]
    colors = [_BLUE if reason == _ACCEPTED else BAD for reason in numbers.index]
    bars = reasons.barh(labels, numbers, color=colors)
    texts = [f"{count:.0f} ({100 * count / len(table):.0f} %)" for count in numbers]
    reasons.bar_label(bars, texts, fontsize=8, padding=3)
    reasons.margins(x=0.25)
    reasons.invert_yaxis()
    tidy(reasons, xlabel="tokens", title="what became of the target's token")
    return png(figure, title)
