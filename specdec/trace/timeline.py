"""Plots a trace: one row per rank, time to the right, one colour per phase (SpecPipe Fig. 12)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

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

_DPI = 160
_WIDE_STEPS, _NEAR_STEPS = 90, 9
_MAX_BARS = 20_000  # more bars could not be distinguished


@dataclass(frozen=True, slots=True)
class Bar:
    """A time interval of a rank."""

    rank: int
    phase: str  # key of ``_COLORS``
    start_ms: float
    ms: float
    step: int  # iteration of the decode loop
    tokens: int  # rows processed; 0 for waits


def bars_of(trace: Mapping[str, Any]) -> tuple[list[Bar], dict[int, str]]:
    """Returns the bars of a ``trace.json`` ordered by time, and its row labels by rank."""
    labels: dict[int, str] = {}
    bars = []
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            labels[event["tid"]] = event["args"]["name"]
        if event["ph"] == "X":
            args = event["args"]
            phase = "draft" if event["name"] == "draft" else event["cat"]
            at, ms = event["ts"] / 1e3, event["dur"] / 1e3
            bars.append(Bar(event["tid"], phase, at, ms, args["step"], args.get("tokens", 0)))
    return sorted(bars, key=lambda bar: (bar.start_ms, bar.rank)), labels


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
    worked = [bar.step for bar in bars if bar.tokens]
    first, last = min(worked, default=0), max((bar.step for bar in bars), default=0)
    wide = (first, min(last, first + _WIDE_STEPS - 1)) if steps is None else steps
    if not any(wide[0] <= step <= wide[1] for step in worked):
        raise ValueError(f"no rank worked in steps {wide[0]} to {wide[1]} (the last is {last})")
    wide = wide[0], min(wide[1], last)
    near = _detail(wide, commits or {})
    figure = Figure(figsize=(15.0, 1.9 + 0.42 * len(labels)), dpi=_DPI, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1.0])
    clock = trace["otherData"]["clock"]
    for ax, (first, last) in ((left, wide), (right, near)):
        _panel(ax, bars, (first, last), commits or {})
        ax.set_xlabel(f"{clock} time (ms)")
        ax.set_title(f"steps {first} to {last}", fontsize=9)
    ranks = sorted(labels)
    left.set_yticks(ranks, [labels[rank] for rank in ranks], fontsize=8)
    left.set_ylim(max(ranks) + 0.6, min(ranks) - 0.6)
    left.set_ylabel("rank")
    figure.suptitle(title or "Timeline of all ranks", fontsize=11, x=0.01, ha="left")
    names = {"compute": "compute (number: tokens)"}
    used = [phase for phase in _COLORS if phase in {bar.phase for bar in bars}]
    handles: list[Any] = [Patch(fc=_COLORS[phase], label=names.get(phase, phase)) for phase in used]
    if commits:
        label = "miss: the tree is discarded"
        handles.append(Line2D([], [], color=_COLORS["prune"], ls=":", label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _detail(wide: tuple[int, int], commits: Mapping[int, str]) -> tuple[int, int]:
    """Selects steps around the first miss that is not near the edge, else around the middle."""
    first, last = wide
    half = _NEAR_STEPS // 2
    misses = [s for s, kind in sorted(commits.items()) if kind == "miss" and first < s < last]
    inside = [s for s in misses if first + half <= s <= last - half]
    middle = (inside or misses or [(first + last) // 2])[0]
    start = max(first, min(middle - half, last - _NEAR_STEPS + 1))
    return start, min(last, start + _NEAR_STEPS - 1)


def _panel(
    ax: Axes, bars: Sequence[Bar], steps: tuple[int, int], commits: Mapping[int, str]
) -> None:
    work = [bar for bar in bars if bar.tokens and steps[0] <= bar.step <= steps[1]]
    if not work:
        return
    start = min(bar.start_ms for bar in work)
    end = max(bar.start_ms + bar.ms for bar in work)
    shown = [bar for bar in bars if bar.start_ms < end and bar.start_ms + bar.ms > start]
    detailed = steps[1] - steps[0] < 2 * _NEAR_STEPS
    edge = {"edgecolor": "white", "linewidth": 0.4} if detailed else {"linewidth": 0}
    for phase, color in _COLORS.items():
        by_rank: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for bar in shown[:_MAX_BARS]:
            if bar.phase == phase:
                by_rank[bar.rank].append((bar.start_ms, bar.ms))
        for rank, intervals in by_rank.items():
            ax.broken_barh(intervals, (rank - 0.4, 0.8), facecolors=color, **edge)
    ends: defaultdict[int, float] = defaultdict(float)
    for bar in work:
        ends[bar.step] = max(ends[bar.step], bar.start_ms + bar.ms)
        if detailed and bar.phase in ("compute", "draft") and bar.ms > 0.04 * (end - start):
            at = bar.start_ms + bar.ms / 2
            ax.text(at, bar.rank, str(bar.tokens), ha="center", va="center", fontsize=6, color="w")
    for step, at in ends.items():
        if commits.get(step) == "miss":
            ax.axvline(at, color=_COLORS["prune"], lw=0.8, ls=":", zorder=3)
    ax.set_xlim(start, end)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
