"""The page of plots of ``open/asynchronous``: a row per layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.open.asynchronous_cases import Case, Speed, Speeds
from experiments.reproduce.drawing import styles, tidy
from experiments.reproduce.items import Item

_PANELS = {
    "ratio": "t_target / t_draft",
    "acceptance": "acceptance",
    "link_ms": "link latency (ms)",
    "batch": "requests at a time",
}
_DPI = 110


def picture(item: Item, speeds: Speeds, replayed: Speeds) -> Figure:
    """Speed-up along each axis, per device at the base case, and on the replayed pair."""
    config = item.config
    names = list(config["methods"])
    layouts = list(config["layouts"])
    fig = Figure(figsize=(19.0, 4.0 * len(layouts) + 0.8), dpi=_DPI, layout="constrained")
    grid = fig.subplots(len(layouts), len(_PANELS) + 2, squeeze=False)
    for axes, layout in zip(grid, layouts, strict=True):
        title = config["layouts"][layout]["title"]
        for ax, (axis, label) in zip(axes, _PANELS.items(), strict=False):
            _along(ax, names, _points(config, speeds, layout, axis))
            fixed = ", ".join(f"{key} {v:g}" for key, v in config["base"].items() if key != axis)
            tidy(ax, x=label, y="speed-up over plain decoding", title=f"{title}\n{fixed}")
            if axis != "acceptance":
                _doublings(ax, axis)
        base = {"layout": layout, "hits": "synthetic", **config["base"]}
        at_base = next(
            methods
            for case, methods in speeds.items()
            if all(getattr(case, key) == value for key, value in base.items())
        )
        _bars(axes[-2], names, {"base": {n: s.per_device for n, s in at_base.items()}})
        tidy(axes[-2], x="", y="speed-up per device", title=f"{title}\nbase case, per device")
        groups = {
            case.hits.partition(", ")[2]: {n: s.value for n, s in methods.items()}
            for case, methods in replayed.items()
            if case.layout == layout
        }
        _bars(axes[-1], names, groups)
        tidy(axes[-1], x="", y="speed-up", title=f"{title}\nbundled pair, replayed")
    for name, look in styles(names).items():
        shown = any(name in methods for methods in speeds.values())
        if shown:
            grid[0][0].plot([], [], ms=4, label=name, **look.line())
    fig.legend(loc="outside lower center", ncols=len(names), fontsize=9, frameon=False)
    fig.suptitle(f"{item.stated.title} (simulated; bands: 95 % over prompts)", fontsize=11)
    return fig


def _points(
    config: Mapping[str, Any], speeds: Speeds, layout: str, axis: str
) -> dict[float, Mapping[str, Speed]]:
    """Value of the axis -> speeds, the other axes at the base."""
    base = {key: value for key, value in config["base"].items() if key != axis}

    def on_line(case: Case) -> bool:
        return case.layout == layout and all(getattr(case, k) == v for k, v in base.items())

    found = {getattr(case, axis): methods for case, methods in speeds.items() if on_line(case)}
    return dict(sorted(found.items()))


def _along(ax: Axes, names: Sequence[str], points: Mapping[float, Mapping[str, Speed]]) -> None:
    for name, style in styles(names).items():
        found = [(x, methods[name]) for x, methods in points.items() if name in methods]
        if not found:
            continue
        xs = [x for x, _ in found]
        ax.plot(xs, [s.value for _, s in found], ms=3.5, lw=1.3, **style.line())
        banded = [(x, s.low, s.high) for x, s in found if s.low is not None and s.high is not None]
        if len(banded) == len(found):
            lows, highs = [b[1] for b in banded], [b[2] for b in banded]
            ax.fill_between(xs, lows, highs, color=style.color, alpha=0.12, lw=0)
    ax.axhline(1.0, color="#888888", lw=0.8)


def _doublings(ax: Axes, axis: str) -> None:
    ax.set_xscale("log", base=10 if axis == "link_ms" else 2)
    ax.xaxis.set_major_formatter("{x:g}")


def _bars(ax: Axes, names: Sequence[str], groups: Mapping[str, Mapping[str, float]]) -> None:
    looks = styles(names)
    for place, (_, values) in enumerate(groups.items()):
        shown = [name for name in names if name in values]
        width = 0.84 / max(1, len(shown))
        for i, name in enumerate(shown):
            x = place + (i - (len(shown) - 1) / 2) * width
            ax.bar(x, values[name], 0.92 * width, **looks[name].bar())
    ax.set_xticks(range(len(groups)), list(groups), fontsize=8)
    ax.axhline(1.0, color="#888888", lw=0.8)
