"""Plots over prompts, positions, depths and time, with one colour per strategy or job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specdec.metrics.compare import decoded_by_prompt, pooled, prompt_speedups
from specdec.metrics.rates import POSITION_BUCKET, drafted_by_position
from specdec.metrics.times import decode_phase, decode_speed
from specdec.report.plots import DRAFTED_LABEL, figure_of, png, tidy
from specdec.report.styles import Style, row_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specdec.metrics.results import RequestResult, Run
    from specdec.report.results import Result

_RATE_TOKENS = 16  # tokens per point of a rate
_FEW = 20  # depths with fewer judged candidates are drawn hollow
MAX_CURVES = 20  # more could not be distinguished

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Curve:
    """The repeats of a strategy or job, drawn in one style.

    ``plain`` has the repeats of plain decoding that it is compared with; it may be empty.
    """

    result: Result
    runs: Sequence[Run]
    plain: Sequence[Run]

    @property
    def is_plain(self) -> bool:
        return self.result.strategy == "ar"


def prompts_png(curves: Sequence[Curve], clock: str) -> bytes:
    """Plots each prompt's speed-up over plain decoding, or tokens per second without a baseline."""
    shown = [c for c in curves if len(c.plain) and not c.is_plain]
    relative = bool(shown)
    shown = (shown or [c for c in curves if pooled(c.runs)])[:MAX_CURVES]
    figure = figure_of(11.0, 1.5 + 0.42 * max(1, len(shown)))
    ax: Axes = figure.subplots()
    styles = styles_of(curves)
    for y, curve in enumerate(shown):
        values = prompt_speedups(curve.runs, curve.plain) if relative else _speeds(curve)
        if not len(values):
            continue
        # Spread equal values vertically so that all dots stay visible.
        offset = (np.argsort(np.argsort(values)) % 5 - 2) * 0.09
        look = styles[curve.result.name].point()
        ax.scatter(values, y + offset, s=16, alpha=0.65, lw=0, zorder=3, **look)
        low, high = np.quantile(values, [0.25, 0.75])
        middle = table_number(curve, relative=relative) or float(np.median(values))
        ax.plot([low, high], [y, y], color="black", lw=1.2, zorder=4)
        ax.plot([middle, middle], [y - 0.28, y + 0.28], color="black", lw=2.0, zorder=4)
        text = f"{middle:.2f}x" if relative else f"{middle:.0f}"
        style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8}
        ax.annotate(text, (middle, y - 0.28), (0, 1), textcoords="offset points", **style)
    ax.set_yticks(range(len(shown)), [c.result.name for c in shown])
    ax.set_ylim(len(shown) - 0.5, -0.65)
    label = f"tokens per second of decoding, {clock} time"
    if relative:
        ax.axvline(1.0, color="#444444", lw=0.9, ls="--", zorder=1)
        label = f"speed-up over ar, {clock} time (ar = 1)"
    tidy(ax, xlabel=label, xlim=(0, ax.get_xlim()[1] * 1.05))
    what = "Speed-up" if relative else "Speed"
    text = f"{what}: dots are prompts, lines their middle half, thick bars the table's number"
    return png(figure, text)


def table_number(curve: Curve, *, relative: bool) -> float | None:
    """Returns the number in the table: over all prompts together, the median over repeats."""
    speeds = [decode_speed(run.results) for run in curve.runs]
    if relative:
        plain = [decode_speed(run.results) for run in curve.plain]
        pairs = zip(speeds, plain, strict=True)
        speeds = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    known = [speed for speed in speeds if speed is not None]
    return median(known) if known else None


def acceptance_png(curves: Sequence[Curve]) -> bytes:
    """Plots acceptance by depth below the root, and the share of drafted tokens by position."""
    figure = figure_of(11.0, 4.0)
    depth, position = figure.subplots(1, 2)
    styles = styles_of(curves)
    for curve in curves[:MAX_CURVES]:
        if curve.is_plain:
            continue
        style = {**styles[curve.result.name].line(), "ms": 3, "lw": 1.3}
        summary = curve.result.summary or {}
        rates = {int(k): rate for k, rate in (summary.get("acceptance_by_depth") or {}).items()}
        if rates:
            depth.plot(list(rates), list(rates.values()), label=curve.result.name, **style)
            judged = summary.get("judged_by_depth") or {}
            few = {d: rate for d, rate in rates.items() if judged.get(str(d), 0) < _FEW}
            hollow = {**style, "ls": "", "mfc": "white", "zorder": 3}
            depth.plot(list(few), list(few.values()), **hollow)
        drafted = drafted_by_position(pooled(curve.runs))
        if drafted:
            middles = [start + POSITION_BUCKET / 2 for start in drafted]
            position.plot(middles, list(drafted.values()), label=curve.result.name, **style)
    if not depth.lines:
        text = "one level per step: every answer is at depth 0"
        depth.text(0.5, 0.5, text, ha="center", va="center", transform=depth.transAxes, fontsize=9)
    depth.locator_params(axis="x", integer=True)
    label, limits = "depth below the root (draft tokens)", (0, 1.02)
    tidy(depth, xlabel=label, ylabel="accepted / judged", ylim=limits)
    label = f"position in the output (tokens, buckets of {POSITION_BUCKET})"
    ends = (0, _last_position(position) + POSITION_BUCKET / 2)
    tidy(position, xlabel=label, ylabel=DRAFTED_LABEL, xlim=ends, ylim=limits)
    title = f"Acceptance by depth (hollow: fewer than {_FEW} judged) and by position"
    return _finish(figure, title, (depth, position))


def throughput_png(curves: Sequence[Curve], clock: str) -> bytes:
    """Plots tokens over time since admission, and tokens per second by position in the output."""
    figure = figure_of(11.0, 4.0)
    time, rate = figure.subplots(1, 2)
    styles = styles_of(curves)
    for curve in curves[:MAX_CURVES]:
        style = {**styles[curve.result.name].line(), "label": curve.result.name}
        seconds = mean_emission(pooled(curve.runs))
        if len(seconds) > 1:
            counts = np.arange(1, len(seconds) + 1)
            time.plot(seconds, counts, lw=1.5, **{**style, "marker": ""})
        positions, speeds = rate_by_position(pooled(curve.runs))
        if len(positions):
            rate.plot(positions, speeds, ms=3, lw=1.3, **style)
    label = f"seconds since admission, {clock} time"
    tidy(time, xlabel=label, ylabel="tokens emitted (mean over prompts)")
    label = f"position in the output (tokens, buckets of {_RATE_TOKENS})"
    ends = (0, _last_position(rate) + _RATE_TOKENS / 2)
    tidy(rate, xlabel=label, ylabel="tokens per second", xlim=ends, ylim=(0, None))
    return _finish(figure, "Throughput", (time, rate))


def mean_emission(results: Sequence[RequestResult]) -> FloatArray:
    """float64[N]: mean over prompts of the seconds from admission to the n-th token.

    N is the largest length that at least half of the prompts reach.
    """
    times = [np.asarray(r.emitted_s) - r.admitted_s for r in results if r.emitted_s]
    if not times:
        return np.zeros(0)
    lengths = sorted((len(t) for t in times), reverse=True)
    length = lengths[(len(lengths) - 1) // 2]
    return np.stack([t[:length] for t in times if len(t) >= length]).mean(0)


def rate_by_position(results: Sequence[RequestResult]) -> tuple[FloatArray, FloatArray]:
    """Returns middle position and tokens per second of each bucket, pooled over prompts.

    Covers the decode phase (``metrics.times.decode_phase``); omits buckets without elapsed time.
    """
    gaps = [decode_phase(result).gaps_s for result in results]
    # The prefill has emitted the tokens before the first gap.
    lengths = [(len(r.output), len(gap)) for r, gap in zip(results, gaps, strict=True)]
    at = [np.arange(length - late, length) for length, late in lengths]
    buckets = np.concatenate([np.zeros(0, np.int64), *at]) // _RATE_TOKENS
    seconds = np.bincount(buckets, np.concatenate([np.zeros(0), *gaps]))
    used = np.flatnonzero(seconds > 0)
    return (used + 0.5) * _RATE_TOKENS, np.bincount(buckets)[used] / seconds[used]


def _speeds(curve: Curve) -> FloatArray:
    phases = decoded_by_prompt(pooled(curve.runs)).values()
    return np.array([count / seconds for count, seconds in phases if seconds > 0])


def styles_of(curves: Sequence[Curve]) -> dict[str, Style]:
    """Maps curve names to styles, which are the same in all plots."""
    return row_styles({curve.result.name: curve.result.strategy for curve in curves})


def _last_position(ax: Axes) -> float:
    """Returns the largest x of a panel's lines, so that a single bucket does not fill the axis."""
    return max((float(np.max(line.get_xdata())) for line in ax.lines), default=0.0)


def _finish(figure: Figure, title: str, axes: Sequence[Axes]) -> bytes:
    handles: dict[str, Any] = {}
    for ax in axes:
        lines, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    if handles:
        style: dict[str, Any] = {"ncols": min(6, len(handles)), "fontsize": 8, "frameon": False}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", **style)
    return png(figure, title)
