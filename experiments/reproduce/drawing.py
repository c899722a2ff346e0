"""Pictures of tables: points and lines with the paper's ranges as bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.reproduce.findings import Measure
from experiments.reproduce.stated import Claim

COLORS = (
    *("#2f6db3", "#c98a2b", "#5b8c5a", "#8a5a9e", "#b33a3a", "#4a4a4a", "#3aa0a0", "#e08fb0"),
    *("#9db82f", "#7a5230"),
)
_BAND = "#f2d7a6"
_DPI = 110
_UNITS = {"x": "times", "%": "per cent", "": "value"}


def figure(width: float = 7.5, height: float = 4.2, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    made = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    axes = made.subplots(1, panels, squeeze=False)[0]
    return made, list(axes)


def tidy(ax: Axes, *, x: str, y: str, title: str = "") -> None:
    """Names the axes (with units), and takes away what nobody reads."""
    ax.set_xlabel(x, fontsize=8.5)
    ax.set_ylabel(y, fontsize=8.5)
    if title:
        ax.set_title(title, fontsize=9)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(color="#e2e2e2", lw=0.6, zorder=0)
    ax.tick_params(labelsize=8)


def legend(ax: Axes, **where: Any) -> None:
    """A legend in small letters."""
    ax.legend(fontsize=7.5, frameon=False, **where)


def below(ax: Axes, columns: int = 1) -> None:
    """A legend under the panel, away from what is drawn."""
    drop = -56.0 / (ax.get_window_extent().height or 1.0)
    anchor = (0.5, min(drop, -0.1))
    ax.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=anchor, ncols=columns)


def doublings(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis that names its values."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), [f"{value:g}" for value in values])
    ax.minorticks_off()


def lines(
    ax: Axes,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    marker: str = "o",
) -> None:
    """One line per name: (xs, ys)."""
    for i, (name, (xs, ys)) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        ax.plot(xs, ys, marker=marker, ms=3.5, lw=1.4, color=color, label=name, zorder=3)


def line_chart(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str, title: str
) -> Figure:
    """A figure of one panel with a line per name."""
    made, (ax,) = figure(6.8, 4.0)
    lines(ax, series)
    tidy(ax, x=x, y=y, title=title)
    legend(ax)
    return made


def band(ax: Axes, low: float, high: float, label: str, *, vertical: bool = False) -> None:
    """The paper's range, or its single value as a line."""
    if low == high:
        line = ax.axvline if vertical else ax.axhline
        line(low, color="#c9982e", lw=1.6, ls="--", label=label, zorder=1)
        return
    span = ax.axvspan if vertical else ax.axhspan
    span(low, high, color=_BAND, label=label, zorder=0)


def bars(
    ax: Axes, groups: Mapping[str, Mapping[str, float | None]], *, form: str = "{:.1f}"
) -> None:
    """Grouped bars: group -> series -> value; None leaves a gap."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        xs = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
        ys = [values.get(name) for values in groups.values()]
        drawn = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
        ax.bar(
            [x for x, _ in drawn],
            [y for _, y in drawn],
            width * 0.92,
            color=COLORS[i % len(COLORS)],
            label=name,
            zorder=2,
        )
        for x, y in drawn:
            ax.annotate(
                form.format(y),
                (x, y),
                (0, 1.5),
                textcoords="offset points",
                ha="center",
                fontsize=6,
            )
    ax.set_xticks(range(len(groups)), list(groups), fontsize=7.5)


def claims_figure(claims: Mapping[str, Claim], measures: Sequence[Measure], title: str) -> Figure:
    """Numbers of ours, with their intervals, over the stated ranges: one row per claim."""
    numeric = [c for c in claims.values() if c.low is not None]
    conditions = {f"{m.conditions} ({m.kind})" for m in measures}
    made, (ax,) = figure(8.5, 1.7 + 0.5 * len(numeric) + 0.17 * len(conditions))
    claims_panel(ax, claims, measures)
    ax.set_title(title, fontsize=9)
    return made


def claims_panel(
    ax: Axes, claims: Mapping[str, Claim], measures: Sequence[Measure], unit: str | None = None
) -> None:
    """The panel of ``claims_figure``: claims that are numbers (of one unit) and have our figure."""
    held = {m.claim for m in measures}
    numeric = [c for c in claims.values() if c.low is not None and c.id in held]
    numeric = [c for c in numeric if unit in (None, c.unit)]
    shown = {c.id for c in numeric}
    measures = [m for m in measures if m.claim in shown]
    conditions = list(dict.fromkeys(f"{m.conditions} ({m.kind})" for m in measures))
    for row, claim in enumerate(numeric):
        low, high = claim.ends
        ax.plot([low, high], [row, row], lw=11, color=_BAND, solid_capstyle="butt", zorder=1)
        if low == high:
            ax.plot([low], [row], marker="|", ms=14, mew=2.2, color="#c9982e", zorder=1)
        for measure in measures:
            if measure.claim == claim.id:
                index = conditions.index(f"{measure.conditions} ({measure.kind})")
                _point(ax, measure, row, index, len(conditions))
    ax.plot([], [], lw=9, color=_BAND, label="the paper's range or value")
    for i, name in enumerate(conditions):
        ax.plot([], [], marker="o", ms=4, lw=0, color=COLORS[i % len(COLORS)], label=fill(name, 76))
    ax.set_yticks(range(len(numeric)), [fill(c.text, 34) for c in numeric])
    ax.set_ylim(len(numeric) - 0.5, -0.5)
    units = {_UNITS.get(c.unit, c.unit) for c in numeric}
    tidy(ax, x=", ".join(sorted(units)) or "value", y="")
    below(ax)


def _point(ax: Axes, measure: Measure, row: int, index: int, count: int) -> None:
    y = row + (index - (count - 1) / 2) * 0.6 / max(1, count)
    color = COLORS[index % len(COLORS)]
    if measure.low is not None and measure.high is not None:
        ax.plot([measure.low, measure.high], [y, y], lw=1.2, color=color, zorder=3)
    ax.plot([float(measure.value)], [y], marker="o", ms=4, lw=0, color=color, zorder=4)


def as_png(made: Any) -> bytes:
    """A figure as PNG; bytes are one already."""
    if isinstance(made, bytes):
        return made
    stream = BytesIO()
    FigureCanvasAgg(made).print_png(stream)
    return stream.getvalue()
