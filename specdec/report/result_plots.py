"""Plots over prompts, positions, depths and time, with one colour per strategy or job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specdec.metrics.compare import decoded_by_prompt, pooled, prompt_speedups
from specdec.metrics.rates import POSITION_BUCKET, drafted_by_position
from specdec.metrics.times import decode_phase
from specdec.report.plots import DRAFTED_LABEL, figure_of, png, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specdec.metrics.results import RequestResult, Run

_COLORS = (
    *("#2f6db3", "#c98a2b", "#5a9e4b", "#b33a3a", "#7d5ba6", "#3a9e9e", "#c45c9c", "#7a6a55"),
    *("#1b3f66", "#8a5a10"),
)
_PLAIN = "#8a8a8a"
_RATE_TOKENS = 16  # tokens per point of a rate
_FEW = 20  # depths with fewer judged candidates are drawn hollow
_MAX_CURVES = 20  # more could not be distinguished

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Data drawn in one colour.

    Attributes:
        label: name of the strategy or job.
        runs: its repeats.
        plain: repeats of the plain decoding that it is compared with; may be empty.
        is_plain: whether it is plain decoding itself.
        acceptance, judged: ``acceptance_by_depth`` and ``judged_by_depth`` of its summary; empty
            if undefined.
    """

    label: str
    runs: Sequence[Run]
    plain: Sequence[Run]
    is_plain: bool
    acceptance: Mapping[str, float]
    judged: Mapping[str, int]

    @property
    def results(self) -> list[RequestResult]:
        """Finished prompts of all repeats."""
        return pooled(self.runs)


def prompts_png(curves: Sequence[Curve], clock: str) -> bytes:
    """Speed-up of each prompt over plain decoding; tokens per second if there is no baseline."""
    shown = [c for c in curves if len(c.plain) and not c.is_plain]
    relative = bool(shown)
    shown = (shown or [c for c in curves if c.results])[:_MAX_CURVES]
    figure = figure_of(11.0, 1.5 + 0.42 * max(1, len(shown)))
    ax: Axes = figure.subplots()
    for y, curve in enumerate(shown):
        values = prompt_speedups(curve.runs, curve.plain) if relative else _speeds(curve)
        if not len(values):
            continue
        color = _color(curves, curve)
        # Spread equal values vertically so that all dots stay visible.
        offset = (np.argsort(np.argsort(values)) % 5 - 2) * 0.09
        ax.scatter(values, y + offset, s=16, color=color, alpha=0.65, lw=0, zorder=3)
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        ax.plot([low, high], [y, y], color="black", lw=1.2, zorder=4)
        ax.plot([middle, middle], [y - 0.28, y + 0.28], color="black", lw=2.0, zorder=4)
        text = f"{middle:.2f}x" if relative else f"{middle:.0f}"
        style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8}
        ax.annotate(text, (middle, y - 0.28), (0, 1), textcoords="offset points", **style)
    ax.set_yticks(range(len(shown)), [c.label for c in shown])
    ax.set_ylim(len(shown) - 0.5, -0.65)
    label = f"tokens per second of decoding, {clock} time"
    if relative:
        ax.axvline(1.0, color="#444444", lw=0.9, ls="--", zorder=1)
        label = f"speed-up over ar, {clock} time (ar = 1)"
    tidy(ax, xlabel=label, xlim=(0, ax.get_xlim()[1] * 1.05))
    what = "Speed-up" if relative else "Speed"
    text = f"{what} per prompt: dots are prompts, thick bars medians, lines the middle half"
    return _finish(figure, text)


def acceptance_png(curves: Sequence[Curve]) -> bytes:
    """Acceptance by depth below the root, and share of proposed tokens by output position."""
    figure = figure_of(11.0, 4.0)
    depth, position = figure.subplots(1, 2)
    for curve in curves[:_MAX_CURVES]:
        style = {"color": _color(curves, curve), "marker": "o", "ms": 3, "lw": 1.3}
        if curve.is_plain:
            continue
        if curve.acceptance:
            _depth_line(depth, curve, style)
        drafted = drafted_by_position(curve.results)
        if drafted:
            # Drawn at the middle of each bucket.
            middles = [start + POSITION_BUCKET / 2 for start in drafted]
            position.plot(middles, list(drafted.values()), label=curve.label, **style)
    if not depth.lines:
        text = "one level per step: every answer is at depth 0"
        depth.text(0.5, 0.5, text, ha="center", va="center", transform=depth.transAxes, fontsize=9)
    label, limits = "depth below the root (draft tokens)", (0, 1.02)
    tidy(depth, xlabel=label, ylabel="accepted / judged", ylim=limits)
    label = f"position in the output (tokens, buckets of {POSITION_BUCKET})"
    tidy(position, xlabel=label, ylabel=DRAFTED_LABEL, ylim=limits)
    title = f"Acceptance by depth (hollow: fewer than {_FEW} judged) and by position"
    return _finish(figure, title, (depth, position))


def _depth_line(ax: Axes, curve: Curve, style: Mapping[str, Any]) -> None:
    """Draws acceptance by depth, with hollow markers for few judged candidates."""
    depths, rates = [int(k) for k in curve.acceptance], list(curve.acceptance.values())
    ax.plot(depths, rates, label=curve.label, **style)
    few = [d for d in depths if curve.judged.get(str(d), 0) < _FEW]
    at = [curve.acceptance[str(d)] for d in few]
    ax.plot(few, at, ls="", marker="o", ms=3, mfc="white", mec=style["color"], zorder=3)


def throughput_png(curves: Sequence[Curve], clock: str) -> bytes:
    """Tokens over time since admission, and tokens per second by position, over all prompts."""
    figure = figure_of(11.0, 4.0)
    time, rate = figure.subplots(1, 2)
    for curve in curves[:_MAX_CURVES]:
        color = _color(curves, curve)
        seconds = mean_emission(curve.results)
        if len(seconds) > 1:
            counts = np.arange(1, len(seconds) + 1)
            time.plot(seconds, counts, color=color, lw=1.5, label=curve.label)
        positions, speeds = rate_by_position(curve.results)
        if len(positions):
            style = {"marker": "o", "ms": 3, "lw": 1.3}
            rate.plot(positions, speeds, color=color, label=curve.label, **style)
    label = f"seconds since admission, {clock} time"
    tidy(time, xlabel=label, ylabel="tokens emitted (mean over prompts)")
    label = f"position in the output (tokens, buckets of {_RATE_TOKENS})"
    tidy(rate, xlabel=label, ylabel="tokens per second", ylim=(0, None))
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
    long_enough = [t[:length] for t in times if len(t) >= length]
    mean: FloatArray = np.mean(long_enough, axis=0)
    return mean


def rate_by_position(results: Sequence[RequestResult]) -> tuple[FloatArray, FloatArray]:
    """Middle position and tokens per second of each bucket, pooled over prompts.

    Covers the decode phase (``metrics.times.decode_phase``); omits buckets without elapsed time.
    """
    tokens, seconds = Counter[int](), Counter[int]()
    for result in results:
        gaps = decode_phase(result).gaps_s
        first = len(result.output) - len(gaps)  # tokens emitted by the prefill
        for i, gap in enumerate(gaps.tolist(), start=first):
            tokens[i // _RATE_TOKENS] += 1
            seconds[i // _RATE_TOKENS] += gap
    used = [bucket for bucket in sorted(tokens) if seconds[bucket] > 0]
    middles = np.array([(bucket + 0.5) * _RATE_TOKENS for bucket in used])
    return middles, np.array([tokens[bucket] / seconds[bucket] for bucket in used])


def _speeds(curve: Curve) -> FloatArray:
    phases = decoded_by_prompt(curve.results).values()
    return np.array([count / seconds for count, seconds in phases if seconds > 0])


def _color(curves: Sequence[Curve], curve: Curve) -> str:
    """Colour of a curve, the same in all plots."""
    if curve.is_plain:
        return _PLAIN
    others = [c.label for c in curves if not c.is_plain]
    return _COLORS[others.index(curve.label) % len(_COLORS)]


def _finish(figure: Figure, title: str, axes: Sequence[Any] = ()) -> bytes:
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    handles: dict[str, Any] = {}
    for ax in axes:
        lines, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    if handles:
        columns = min(6, len(handles))
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=columns,
            fontsize=8,
            frameon=False,
        )
    return png(figure)
