"""Plots a trace: one row per rank, time to the right, one colour per phase (SpecPipe Fig. 12)."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS: Mapping[str, str] = {
    "compute": "#2f6db3",
    "draft": "#7fb069",
    "prune": "#d1495b",
    "transmit": "#edae49",
    "wait": "#e9e9e9",
}
"""Drafting is compute too, but has its own colour because it runs in parallel with the stages."""

_WIDE_STEPS, _NEAR_STEPS = 90, 9
_MAX_BARS = 20_000  # more bars could not be distinguished


def bars_of(trace: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[int, str]]:
    """Returns the events of a ``trace.json`` ordered by time, and its row labels by rank.

    Columns: ``rank``, ``phase`` (key of ``_COLORS``), ``start`` and ``ms`` in milliseconds,
    ``step``, ``tokens`` (rows processed; 0 for waits).
    """
    events = trace["traceEvents"]
    labels = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = [
        {
            "rank": event["tid"],
            "phase": "draft" if event["name"] == "draft" else event["cat"],
            "start": event["ts"] / 1e3,
            "ms": event["dur"] / 1e3,
            "step": event["args"]["step"],
            "tokens": event["args"].get("tokens", 0),
        }
        for event in events
        if event["ph"] == "X"
    ]
    bars = pd.DataFrame(rows, columns=["rank", "phase", "start", "ms", "step", "tokens"])
    return bars.sort_values(["start", "rank"], kind="stable"), labels


def timeline_png(
    trace: Mapping[str, Any],
    *,
    steps: tuple[int, int] | None = None,
    commits: Mapping[int, str] | None = None,
    title: str = "",
) -> bytes:
    """Plots the timeline of all ranks as PNG: many steps on the left, a few in detail on the right.

    Args:
        trace: content of ``trace.json``.
        steps: first and last step on the left (default: the first 90).
        commits: step -> "hit" or "miss"; misses are marked, and the detail shows the first one.

    Raises:
        ValueError: no rank worked in these steps.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars, labels = bars_of(trace)
    worked = bars.loc[bars["tokens"] > 0, "step"]
    first, last = (int(worked.min()), int(bars["step"].max())) if len(worked) else (0, 0)
    wide = (first, min(last, first + _WIDE_STEPS - 1)) if steps is None else steps
    if not worked.between(*wide).any():
        raise ValueError(f"no rank worked in steps {wide[0]} to {wide[1]} (the last is {last})")
    wide = wide[0], min(wide[1], last)
    misses = [step for step, kind in (commits or {}).items() if kind == "miss"]
    figure = Figure(figsize=(15.0, 2.1 + 0.42 * len(labels)), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1.0])
    for ax, (first, last) in ((left, wide), (right, _detail(wide, misses))):
        _panel(ax, bars, (first, last), misses)
        ax.set_xlabel(f"{trace['otherData']['clock']} time (ms)")
        ax.set_title(f"steps {first} to {last}", fontsize=9)
    ranks = sorted(labels)
    left.set_yticks(ranks, [labels[rank] for rank in ranks], fontsize=8)
    left.set_ylim(max(ranks) + 0.6, min(ranks) - 0.6)
    left.set_ylabel("rank")
    text = title or "Timeline of all ranks"
    figure.suptitle(text, fontsize=10, x=0.01, ha="left", parse_math=False)
    used = [phase for phase in _COLORS if phase in set(bars["phase"])]
    names = {"compute": "compute (number: tokens)"}
    handles: list[Any] = [Patch(fc=_COLORS[phase], label=names.get(phase, phase)) for phase in used]
    if commits:
        label = "miss: the tree is discarded"
        handles.append(Line2D([], [], color=_COLORS["prune"], ls=":", label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _detail(wide: tuple[int, int], misses: list[int]) -> tuple[int, int]:
    """Selects steps around the first miss that is not near the edge, else around the middle."""
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
        ax.broken_barh(spans, (rank - 0.4, 0.8), facecolors=_COLORS[phase], **edge)
    if detailed:
        large = work[work["phase"].isin(["compute", "draft"]) & (work["ms"] > 0.04 * (end - start))]
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": "w"}
        for bar in large.itertuples():
            ax.text(bar.start + bar.ms / 2, bar.rank, str(bar.tokens), **style)
    for step, at in (work["start"] + work["ms"]).groupby(work["step"]).max().items():
        if step in misses:
            ax.axvline(at, color=_COLORS["prune"], lw=0.8, ls=":", zorder=3)
    ax.set_xlim(start, end)
    ax.spines[["top", "right"]].set_visible(False)
