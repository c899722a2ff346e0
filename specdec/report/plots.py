"""Plots runs, comparisons and sweeps as PNG; a strategy has the same style in every plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specdec.metrics.rates import POSITION_BUCKET, drafted_by_position
from specdec.metrics.results import RequestResult
from specdec.metrics.times import all_gaps, decode_phase
from specdec.report.results import Result
from specdec.report.styles import Style, row_styles
from specdec.report.tables import NONE, Row, is_lossy, lossless_label, percent, shown_rows, title_of
from specdec.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAD = "#b00020"
_RATE_TOKENS = 16  # tokens per point of a rate
_FEW_JUDGED = 20  # depths with fewer judged candidates are drawn hollow
MAX_CURVES = 20  # more could not be distinguished


def comparison_png(
    rows: Sequence[Row],
    conditions: Mapping[str, Any],
    styles: Sequence[Style],
    points: Sequence[FloatArray],
) -> bytes:
    """Plots speed, acceptance, speed-up over ``ar``; ``points``: per row the prompts' speed-ups."""
    figure, rows = figure_of(11.0, 2.2 + 0.46 * len(rows)), shown_rows(rows, conditions)
    widths = [1.45, 1, 1] if any(row.get("speedup_wall") is not None for row in rows) else [1, 1]
    *first, speed, third = axes = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    for speedup in first:  # none without ar
        # The numbers stand above the dots, so that they do not read as the value of the last dot.
        _bars(speedup, rows, styles, "speedup_wall", "{:.2f}x", above=11)
        tidy(speedup, xlabel="speed-up over ar (tokens per second of decoding, ar = 1)")
        for y, (row, values) in enumerate(zip(rows, points, strict=True)):
            jitter = (np.arange(len(values)) % 5 - 2) * 0.06
            speedup.scatter(values, y + jitter, s=7, color="black", alpha=0.35, lw=0, zorder=3)
            low, high = row.get("speedup_wall_range") or (0, 0)
            if low < high:
                speedup.plot([low, high], [y, y], color="black", lw=1.6, zorder=4)
        speedup.axvline(1.0, color="#444444", lw=0.9, ls="--", zorder=1)
    _bars(speed, rows, styles, "tokens_per_s", "{:.0f}")
    tidy(speed, xlabel="tokens per second (decoding)")
    name, label = "acceptance_length", "acceptance length (tokens per target pass)"
    if any(row.get("hit_rate") is not None for row in rows):
        name, label = "hit_rate", "hit rate (share of answers)"
    _bars(third, rows, styles, name, "{:.2f}")
    tidy(third, xlabel=label)
    for ax in axes:
        ax.set_xlim(0, max(ax.get_xlim()[1], 1e-9) * 1.16)  # room for the numbers at the bars' ends
    kinds = [lossless_label(row) for row in rows]
    labels = []
    for row, kind in zip(rows, kinds, strict=True):
        loops = [] if row.get("loop_share") is None else [f"loops {percent(row['loop_share'])}"]
        labels.append(f"{row['strategy']}\n{', '.join([kind] * (kind != NONE) + loops)}")
    axes[0].set_yticks(range(len(rows)), labels)
    red = [is_lossy(row) and not row["quantized"] for row in rows]
    for tick, is_red in zip(axes[0].get_yticklabels(), red, strict=True):
        tick.set_color(BAD if is_red else "black")
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    legend = [
        "Bars: a colour per strategy, as in all pictures; median over repeats",
        *(["black line: range over repeats; dots: single prompts"] if first else []),
        *(["below the name: whether the tokens are those of ar"] if {*kinds} - {NONE} else []),
        *(["red names: lossy or not lossless"] if any(red) else []),
        *(f"{row['strategy']}: {row['caveat']}" for row in rows if row.get("caveat")),
    ]
    text = f"{'; '.join(legend)}. Loops: share of tokens ending an 8-gram generated before."
    figure.supxlabel(fill(text, 150), fontsize=7.5, color="#444444", x=0.01, ha="left")
    return png(figure, "Strategies compared", conditions)


def _bars(
    ax: Axes, rows: Sequence[Row], styles: Sequence[Style], name: str, form: str, above: int = 0
) -> None:
    text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    for y, (row, style) in enumerate(zip(rows, styles, strict=True)):
        value = row.get(name)
        ax.barh(y, value or 0.0, height=0.62, zorder=2, **style.bar())
        label = NONE if value is None else form.format(value)
        ax.annotate(label, (value or 0.0, y), (4, above), zorder=5, **text)


def run_png(result: Result) -> bytes:
    figure = figure_of(11.0, 7.4)
    time, rate, depth, position = figure.subplots(2, 2).flat
    _throughput(time, rate, [result])
    _acceptance(depth, position, [result])
    loops = percent((result.summary or {}).get("loop_share"))
    return png(figure, f"{result.name}, loop_share {loops}", result.conditions)


def progress_pngs(results: Sequence[Result], conditions: Mapping[str, Any]) -> dict[str, bytes]:
    """Plots throughput and acceptance of several results; returns the pictures by name."""
    by_depth = f"Acceptance by depth (hollow: fewer than {_FEW_JUDGED} judged) and by position"
    draws = {"throughput": (_throughput, "Throughput"), "acceptance": (_acceptance, by_depth)}
    pictures = {}
    for name, (draw, title) in draws.items():
        figure = figure_of(11.0, 4.0)
        left, right = figure.subplots(1, 2)
        draw(left, right, results)
        pictures[name] = png(figure, title, conditions, legend=(left, right))
    return pictures


def _acceptance(depth: Axes, position: Axes, results: Sequence[Result]) -> None:
    for result, style in _drawn(results, plain=False):
        summary = result.summary or {}
        rates = {int(k): rate for k, rate in (summary.get("acceptance_by_depth") or {}).items()}
        if rates:
            depth.plot(list(rates), list(rates.values()), **style)
            judged = summary.get("judged_by_depth") or {}
            few = {d: rate for d, rate in rates.items() if judged.get(str(d), 0) < _FEW_JUDGED}
            hollow = {**style, "ls": "", "mfc": "white", "zorder": 3, "label": None}
            depth.plot(list(few), list(few.values()), **hollow)
        if drafted := drafted_by_position(result.requests):
            middles = [start + POSITION_BUCKET / 2 for start in drafted]
            position.plot(middles, list(drafted.values()), **style)
    if not depth.lines:
        text = "no draft tokens, or one level per step: every answer is at depth 0"
        depth.text(0.5, 0.5, text, ha="center", va="center", transform=depth.transAxes, fontsize=9)
        depth.set_axis_off()
    depth.locator_params(axis="x", integer=True)
    label, limits = "depth below the root (draft tokens)", (0, 1.02)
    tidy(depth, xlabel=label, ylabel="accepted / judged", ylim=limits)
    _by_position(position, POSITION_BUCKET, "share of tokens that a source proposed", limits)


def _throughput(time: Axes, rate: Axes, results: Sequence[Result]) -> None:
    for result, style in _drawn(results):
        seconds = mean_emission(result.requests)
        if len(seconds) > 1:
            time.plot(seconds, range(1, len(seconds) + 1), **{**style, "lw": 1.5, "marker": ""})
        positions, speeds = rate_by_position(result.requests)
        if len(positions):
            rate.plot(positions, speeds, **style)
    tidy(time, xlabel="seconds since admission", ylabel="tokens emitted (mean over prompts)")
    _by_position(rate, _RATE_TOKENS, "tokens per second", (0, None))


def mean_emission(requests: Sequence[RequestResult]) -> FloatArray:
    """Returns mean seconds from admission to token n, for each n that half the prompts reach."""
    times = (np.asarray(r.emitted_s) - r.admitted_s for r in requests if r.emitted_s)
    table = pd.DataFrame({i: pd.Series(own) for i, own in enumerate(times)})  # [token, prompt]
    length = int((2 * table.count(axis=1) >= table.shape[1]).sum())
    return table.iloc[:length].dropna(axis=1).mean(axis=1).to_numpy()


def rate_by_position(requests: Sequence[RequestResult]) -> tuple[FloatArray, FloatArray]:
    """Returns middle position and tokens per second of each bucket of decode-phase positions."""
    # The prefill has emitted the tokens before the first gap.
    starts = [len(r.output) - decode_phase(r).tokens for r in requests]
    at = [np.arange(start, len(r.output)) for start, r in zip(starts, requests, strict=True)]
    buckets = np.concatenate([np.zeros(0, np.int64), *at]) // _RATE_TOKENS
    seconds = np.bincount(buckets, all_gaps(requests))
    used = np.flatnonzero(seconds > 0)
    return (used.astype(float) + 0.5) * _RATE_TOKENS, np.bincount(buckets)[used] / seconds[used]


def _drawn(
    results: Sequence[Result], *, plain: bool = True
) -> Iterator[tuple[Result, dict[str, Any]]]:
    """Yields the results to draw, with arguments of ``Axes.plot``; ``ar`` only if ``plain``."""
    styles = row_styles({result.name: result.strategy for result in results})
    for result in results[:MAX_CURVES]:
        if plain or result.strategy != "ar":
            yield result, styles[result.name].line() | {"label": result.name, "ms": 3, "lw": 1.3}


def _by_position(ax: Axes, bucket: int, ylabel: str, ylim: Any) -> None:
    last = max((float(np.max(line.get_xdata())) for line in ax.lines), default=0.0)
    label = f"position in the output (tokens, buckets of {bucket})"
    tidy(ax, xlabel=label, ylabel=ylabel, xlim=(0, last + bucket / 2), ylim=ylim)


def tidy(ax: Axes, **labels: Any) -> None:
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="both" if ax.get_ylabel() else "x", color="#dddddd", lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)
    ax.xaxis.label.set_fontsize(8.5)
    ax.yaxis.label.set_fontsize(8.5)
    ax.title.set_fontsize(9)


def figure_of(width: float, height: float, dpi: int = 150) -> Figure:
    from matplotlib.figure import Figure  # takes a second to import

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def png(
    figure: Figure,
    title: str,
    conditions: Mapping[str, Any] | None = None,
    legend: Iterable[Axes] = (),
) -> bytes:
    """Adds a title, a line of conditions and a legend of some axes; returns the figure as PNG."""
    width = int(13 * figure.get_figwidth())  # characters
    text = f"{title}\n{fill(title_of(conditions), width)}" if conditions else title
    figure.suptitle(text, fontsize=9, x=0.01, ha="left", parse_math=False)
    handles: dict[str, Any] = {}
    for ax in legend:
        drawn, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    if handles:
        side_by_side = min(6, len(handles), int(width / (max(map(len, handles)) + 5)))
        style: dict[str, Any] = {"fontsize": 8, "frameon": False, "ncols": max(1, side_by_side)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", **style)
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
