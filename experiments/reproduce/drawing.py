"""Pictures: points, lines and bars, with the paper's ranges as bands.

A colour stands for a strategy, in all pictures the same (``specdec.report.styles``). Conditions of
one claim are told apart by letters.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.transforms import ScaledTranslation

from experiments.reproduce.findings import Measure
from experiments.reproduce.stated import Claim
from specdec.report.styles import Style, row_styles

_PRESET_OF = {
    **dict.fromkeys(("pp", "plain", "plain_decoding", "autoregressive"), "ar"),
    "stpp": "specinfer",
    "chain_of": "speculative",
    "specpipe_best_first": "specpipe_bf",
    "eagle_3_bundled_head": "eagle2",  # its tree
}
"""Names of rows in the papers -> presets; other names are compared with the presets' own."""
_BAND = "#f2d7a6"
_DPI = 110
_UNITS = {"x": "times", "%": "per cent", "": "value"}


def figure(width: float = 7.5, height: float = 4.2, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    fig = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    axes = list(fig.subplots(1, panels, squeeze=False)[0])
    for ax in axes:
        ax.tick_params(labelsize=8)
    return fig, axes


def tidy(ax: Axes, *, x: str, y: str, title: str = "") -> None:
    """Labels the axes (with units) and removes the upper and right spines."""
    ax.set_xlabel(x, fontsize=8.5)
    ax.set_ylabel(y, fontsize=8.5)
    if title:
        ax.set_title(title, fontsize=9)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(color="#e2e2e2", lw=0.6)


def legend(ax: Axes) -> None:
    """A legend under the panel, below the axis label, in as many columns as fit."""
    fig = ax.figure
    names = ax.get_legend_handles_labels()[1]
    inches = fig.get_figure(root=True).get_figwidth() / len(fig.axes)
    longest = max((len(line) for name in names for line in name.split("\n")), default=1)
    columns = max(1, min(len(names), int(inches / (0.55 + 0.062 * longest))))
    lines_of_ticks = 1 + max((t.get_text().count("\n") for t in ax.get_xticklabels()), default=0)
    points = 26.0 + 9.5 * lines_of_ticks
    under = ax.transAxes + ScaledTranslation(0.0, -points / 72.0, fig.dpi_scale_trans)
    place: dict[str, Any] = {"bbox_to_anchor": (0.5, 0.0), "bbox_transform": under}
    place |= {"loc": "upper center", "borderaxespad": 0.0, "ncols": columns}
    ax.legend(fontsize=7.5, frameon=False, **place)


def doublings(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis with a tick for each value."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), [f"{value:g}" for value in values])
    ax.minorticks_off()


def styles(names: Iterable[str]) -> dict[str, Style]:
    """The style of each row of a picture: its strategy's, where its name tells one."""
    return row_styles({name: _strategy(name) for name in names})


def _strategy(name: str) -> str:
    """The preset that a row's name stands for: "SpecInfer, serial" and "PipeDec 14" too."""
    parts = (name, re.sub(r"\s+\d+$", "", name.split(",")[0]))
    whole, first = (re.sub(r"[^a-z0-9]+", "_", part.lower()) for part in parts)
    return _PRESET_OF.get(whole) or _PRESET_OF.get(first, first)


def lines(ax: Axes, series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """One line per name: (xs, ys)."""
    looks = styles(series)
    for name, (xs, ys) in series.items():
        ax.plot(xs, ys, ms=3.5, lw=1.4, label=name, zorder=3, **looks[name].line())


def bar_chart(
    groups: Mapping[str, Mapping[str, float | None]],
    *,
    x: str,
    y: str,
    title: str,
    size: tuple[float, float],
    form: str = "{:.1f}",
) -> Figure:
    """A figure of one panel with grouped ``bars``."""
    fig, (ax,) = figure(*size)
    bars(ax, groups, form=form)
    tidy(ax, x=x, y=y, title=title)
    legend(ax)
    return fig


def line_chart(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    title: str,
    within: tuple[float, float, str] | None = None,
    size: tuple[float, float] = (6.8, 4.2),
) -> Figure:
    """A figure of one panel with a line per name; ``within``: a band's ends and name."""
    fig, (ax,) = figure(*size)
    lines(ax, series)
    if within is not None:
        band(ax, *within)
    tidy(ax, x=x, y=y, title=title)
    legend(ax)
    return fig


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
    """Grouped bars: group -> series -> value; a series that a group lacks leaves no gap."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    groups_of_bars = [
        {n: v for n, v in values.items() if v is not None} for values in groups.values()
    ]
    most = max((len(values) for values in groups_of_bars), default=1)
    width = 0.84 / max(1, most)
    upright = 90 if most * len(groups_of_bars) > 24 else 0
    looks = styles(names)
    for name in names:
        drawn = []
        for group, values in enumerate(groups_of_bars):
            if name in values:
                place = list(values).index(name)
                drawn.append((group + (place - (len(values) - 1) / 2) * width, values[name]))
        xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
        ax.bar(xs, ys, width * 0.92, label=name, zorder=2, **looks[name].bar())
        look: dict[str, Any] = {"ha": "center", "fontsize": 6, "rotation": upright}
        for x, y in drawn:
            ax.annotate(form.format(y), (x, y), (0, 2), textcoords="offset points", **look)
    ax.margins(y=0.1)
    size = 7.5 if len(groups) < 7 else 6.0  # seven names of eleven letters beside each other
    ax.set_xticks(range(len(groups)), [fill(name, 11) for name in groups], fontsize=size)


def claims_figure(claims: Mapping[str, Claim], measures: Sequence[Measure], title: str) -> Figure:
    """Our numbers with their intervals over the stated ranges, one row per claim."""
    numeric = [c for c in claims.values() if c.low is not None]
    fig, (ax,) = figure(8.5, 1.7 + 0.5 * len(numeric) + 0.17 * len({_where(m) for m in measures}))
    claims_panel(ax, claims, measures)
    ax.set_title(title, fontsize=9)
    return fig


def claims_panel(
    ax: Axes, claims: Mapping[str, Claim], measures: Sequence[Measure], unit: str | None = None
) -> None:
    """The panel of ``claims_figure``: numeric claims (of ``unit``) for which we have a figure."""
    measured = {m.claim for m in measures}
    numeric = [c for c in claims.values() if c.low is not None and c.id in measured]
    numeric = [c for c in numeric if unit in (None, c.unit)]
    shown = {c.id for c in numeric}
    measures = [m for m in measures if m.claim in shown]
    conditions = list(dict.fromkeys(_where(m) for m in measures))
    for row, claim in enumerate(numeric):
        low, high = claim.ends
        ax.plot([low, high], [row, row], lw=11, color=_BAND, solid_capstyle="butt", zorder=1)
        if low == high:
            ax.plot([low], [row], marker="|", ms=14, mew=2.2, color="#c9982e", zorder=1)
        points = [measure for measure in measures if measure.claim == claim.id]
        for i, measure in enumerate(points):
            letter = _letter(conditions.index(_where(measure)))
            _point(ax, measure, row + (i - (len(points) - 1) / 2) * 0.7 / len(points), letter)
    ax.plot([], [], lw=9, color=_BAND, label="the paper's range or value")
    for i, name in enumerate(conditions):
        ax.plot([], [], lw=0, label=fill(f"{_letter(i)}: {name}", 70))
    ax.set_yticks(range(len(numeric)), [fill(c.text, 34) for c in numeric])
    ax.set_ylim(len(numeric) - 0.5, -0.5)
    units = {_UNITS.get(c.unit, c.unit) for c in numeric}
    tidy(ax, x=", ".join(sorted(units)) or "value", y="")
    legend(ax)


def _where(measure: Measure) -> str:
    """Label of a point: conditions and kind, without the arithmetic of a formula."""
    text = measure.conditions.split(": ")[0] if measure.origin == "formula" else measure.conditions
    return f"{text} ({measure.origin})"


def _point(ax: Axes, measure: Measure, y: float, letter: str) -> None:
    """A measure's interval, with its letter at the value."""
    if measure.low is not None and measure.high is not None:
        ax.plot([measure.low, measure.high], [y, y], lw=1.2, color="#9a9a9a", zorder=3)
    ax.plot([float(measure.value)], [y], lw=0, ms=0.0, marker="o", zorder=4)  # widens the axis
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "weight": "bold"}
    text = ax.text(float(measure.value), y, letter, color="#222222", zorder=5, **style)
    text.set_path_effects([withStroke(linewidth=1.8, foreground="white")])


def _letter(number: int) -> str:
    """A to Z, then AA to ZZ: conditions are no strategies, so that a colour would mislead."""
    letters = string.ascii_uppercase
    more, last = divmod(number, len(letters))
    return (letters[more - 1] if more else "") + letters[last]


def as_png(picture: Any) -> bytes:
    """A figure as PNG; bytes are returned unchanged."""
    if isinstance(picture, bytes):
        return picture
    stream = BytesIO()
    FigureCanvasAgg(picture).print_png(stream)
    return stream.getvalue()
