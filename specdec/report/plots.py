"""Plots a comparison or one run as PNG, without opening a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.metrics.compare import prompt_speedups
from specdec.metrics.times import decode_phase
from specdec.report.styles import row_styles
from specdec.report.tables import lossless_label, percent, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specdec.metrics.results import RequestResult, Run

Row = Mapping[str, Any]

_BAD = "#b00020"
_DPI = 150
DRAFTED_LABEL = "share of tokens that a source proposed"


def comparison_png(
    rows: Sequence[Row],
    conditions: Mapping[str, Any],
    runs: Mapping[str, Sequence[Run]] | None = None,
) -> bytes:
    """Plots speed-up over ``ar``, tokens per second and acceptance of each strategy.

    Without ``runs``, the repeats of each strategy, the spread over prompts is not drawn.
    """
    figure = figure_of(11.0, 2.2 + 0.46 * len(rows))
    speedup, speed, third = figure.subplots(1, 3, sharey=True, width_ratios=[1.45, 1.0, 1.0])
    label = "speed-up over ar (tokens per second of decoding, ar = 1)"
    # The numbers stand above the dots, so that they do not read as the value of the last dot.
    _bars(speedup, rows, "speedup_wall", label, "{:.2f}x", missing="", above=11)
    _spreads(speedup, rows, runs or {})
    _bars(speed, rows, "tokens_per_s", "tokens per second (decoding)", "{:.0f}")
    if any(row.get("hit_rate") is not None for row in rows):
        _bars(third, rows, "hit_rate", "hit rate (share of answers)", "{:.2f}")
    else:
        label = "acceptance length (tokens per target pass)"
        _bars(third, rows, "acceptance_length", label, "{:.2f}")
    for ax in (speedup, speed, third):
        ax.set_xlim(0, max(ax.get_xlim()[1], 1e-9) * 1.16)  # room for the numbers at the bars' ends
    speedup.set_yticks(range(len(rows)), [_row_label(row) for row in rows])
    for label, row in zip(speedup.get_yticklabels(), rows, strict=True):
        label.set_color(_BAD if _is_lossy(row) else "black")
    speedup.set_ylim(len(rows) - 0.5, -0.5)
    legend = fill(_legend(rows, bool(runs)), 150)
    figure.supxlabel(legend, fontsize=7.5, color="#444444", x=0.01, ha="left")
    return png(figure, fill(f"Strategies compared: {title_of(conditions)}", 118), fontsize=11)


def run_png(
    summary: Mapping[str, Any], results: Sequence[RequestResult], conditions: Mapping[str, Any]
) -> bytes:
    """Plots a run: tokens over time, tokens per answer, acceptance by depth."""
    figure = figure_of(11.0, 3.9)
    emission, paths, depth = figure.subplots(1, 3)
    shown, name = results[:32], str(summary.get("strategy") or conditions.get("strategy") or "")
    color = row_styles([name])[name].color
    for result in shown:
        if result.emitted_s:
            times = np.asarray(result.emitted_s) - result.admitted_s
            counts = np.arange(1, len(times) + 1)
            emission.step(times, counts, where="post", lw=0.9, alpha=0.6, color=color)
    title = f"{len(shown)} prompt{'s' if len(shown) != 1 else ''}, one line each"
    tidy(emission, xlabel="seconds since admission", ylabel="tokens emitted", title=title)
    lengths = summary.get("path_lengths") or {}
    if len(lengths) > 1:
        _histogram(paths, lengths, color)
        title = "accepted path and one more token"
        tidy(paths, xlabel="tokens decided per answer", ylabel="answers", title=title)
    else:
        _gap_panel(paths, results, color)
    shares = summary.get("acceptance_by_depth") or {}
    if any(shares.values()):
        _histogram(depth, shares, color)
        tidy(depth, xlabel="depth below the root", ylabel="accepted / judged", ylim=(0, 1))
    else:
        shares = summary.get("drafted_share_by_position") or {}
        depth.plot([int(k) for k in shares], list(shares.values()), marker="o", ms=3, color=color)
        end, label = max(map(int, shares), default=0) + 32, "position in the output (tokens)"
        tidy(depth, xlabel=label, ylabel=DRAFTED_LABEL, xlim=(-2, end), ylim=(0, 1.02))
    loops = percent(summary.get("loop_share"))
    title = f"{name}: {title_of(conditions)}" if name else title_of(conditions)
    return png(figure, f"{fill(title, 118)}\nloop_share {loops}")


def _gap_panel(ax: Axes, results: Sequence[RequestResult], color: str) -> None:
    ms = np.concatenate([np.zeros(0), *(decode_phase(result).gaps_s for result in results)]) * 1e3
    # On a simulated clock all gaps may be equal up to rounding: too narrow a range for 40 bins.
    edges = (ms.min(), max(ms.max(), ms.min() + 1.0)) if len(ms) else None
    ax.hist(ms, bins=40, range=edges, color=color, alpha=0.85, zorder=2)
    title = "one token per answer"
    tidy(ax, xlabel="milliseconds between tokens", ylabel="tokens", title=title)


def _bars(
    ax: Axes,
    rows: Sequence[Row],
    name: str,
    label: str,
    form: str,
    missing: str = "-",
    above: int = 0,
) -> None:
    """Draws one horizontal bar per row and writes its value ``above`` points over its end."""
    styles = row_styles([str(row["strategy"]) for row in rows])
    for y, row in enumerate(rows):
        value = row.get(name)
        if value is not None:
            ax.barh(y, value, height=0.62, zorder=2, **styles[str(row["strategy"])].bar())
        text, at = missing if value is None else form.format(value), (value or 0, y)
        style: dict[str, Any] = {"va": "center", "fontsize": 8, "zorder": 5}
        ax.annotate(text, at, (4, above), textcoords="offset points", **style)
    tidy(ax, xlabel=label)


def _spreads(ax: Axes, rows: Sequence[Row], runs: Mapping[str, Sequence[Run]]) -> None:
    """Draws a dot per prompt and a line over the range of repeats, for each row's speed-up."""
    for y, row in enumerate(rows):
        name, spread = row["strategy"], row.get("speedup_wall_range")
        if row.get("speedup_wall") is None:
            continue
        if runs.get(name) and runs.get("ar") and name != "ar":
            points = prompt_speedups(runs[name], runs["ar"])
            jitter = (np.arange(len(points)) % 5 - 2) * 0.06
            ax.scatter(points, y + jitter, s=7, color="black", alpha=0.35, lw=0, zorder=3)
        if spread and spread[0] < spread[1]:
            ax.plot(spread, [y, y], color="black", lw=1.6, solid_capstyle="butt", zorder=4)
    ax.axvline(1.0, color="#444444", lw=0.9, ls="--", zorder=1)


def _histogram(ax: Axes, counts: Mapping[str, float], color: str) -> None:
    ax.bar([int(k) for k in counts], list(counts.values()), color=color, alpha=0.85, zorder=2)
    if 0 < len(counts) <= 12:
        ax.set_xticks([int(k) for k in counts])


def _row_label(row: Row) -> str:
    loops = row.get("loop_share")
    label = lossless_label(row)
    second = f"lossless: {label}" if label[:2] in ("ye", "NO") else label
    second += f", loops {percent(loops)}" if loops is not None else ""
    return f"{row['strategy']}\n{second}"


def _legend(rows: Sequence[Row], spread: bool) -> str:
    text = "Bars: a colour per strategy, as in all pictures; median over repeats"
    text += "; black line: range over repeats"
    if spread:
        text += "; dots: single prompts"
    if any(_is_lossy(row) for row in rows):
        text += "; red names: lossy or not lossless"
    return text + ". Loops: share of tokens ending an 8-gram generated before."


def _is_lossy(row: Row) -> bool:
    return row.get("lossless") is False or row.get("claims") == "lossy"


def tidy(ax: Axes, **labels: Any) -> None:
    """Applies the common axis style; ``labels`` are arguments of ``Axes.set``."""
    ax.set(**labels)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(axis="both" if ax.get_ylabel() else "x", color="#dddddd", lw=0.6, zorder=0)
    ax.tick_params(labelsize=8)
    ax.xaxis.label.set_fontsize(8.5)
    ax.yaxis.label.set_fontsize(8.5)
    ax.title.set_fontsize(9)


def figure_of(width: float, height: float) -> Figure:
    """Creates an empty figure; width and height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def png(figure: Figure, title: str = "", fontsize: int = 10) -> bytes:
    """Returns the PNG file of a figure, with a title at the top left."""
    if title:
        figure.suptitle(title, fontsize=fontsize, x=0.01, ha="left")
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
