"""Presents a comparison over batch sizes as a plot and as a page in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from specdec.report.plots import figure_of, png, tidy
from specdec.report.styles import row_styles
from specdec.report.tables import (
    COLUMNS,
    NONE,
    markdown_lines,
    metric,
    percent,
    title_of,
    used_columns,
)

Row = Mapping[str, Any]

_COLUMNS = (
    metric("batch", "", "batch_size", 0),
    metric("tokens/s", "", "throughput_tokens_per_s", 1),
    metric("TBT ms", "", "tbt_ms_mean", 1),
    metric("p50", "", "tbt_ms_p50", 1),
    metric("p95", "", "tbt_ms_p95", 1),
    metric("p99", "", "tbt_ms_p99", 1),
    metric("p99 of requests", "", "tbt_ms_request_p99", 1),
    metric("TTFT ms", "", "ttft_ms", 0),
    metric("queue ms", "", "queue_ms", 0),
    metric("open", "", "mean_batch", 1),
    metric("KV peak", "", "kv_tokens_peak", 0),
    metric("x ar", "", "throughput_over_ar", 2),
    metric("TBT x ar", "", "tbt_over_ar", 2),
    metric("x cross", "", "throughput_over_cross", 2),
    metric("TBT x cross", "", "tbt_over_cross", 2),
)


def curves_png(rows: Sequence[Row], conditions: Mapping[str, Any]) -> bytes:
    """Plots throughput against time between tokens, and its p99 over batch sizes, as PNG.

    The axes are those of Fig. 16 and 17 of SpecPipe (arXiv 2504.04104 v2). ``rows`` has one row per
    strategy and batch size.
    """
    figure = figure_of(11.0, 4.8)
    speed, tail = figure.subplots(1, 2)
    styles = row_styles(dict.fromkeys(str(row["strategy"]) for row in rows))
    for name, look in styles.items():
        points = [row for row in rows if row["strategy"] == name]
        sizes = [row["batch_size"] for row in points]
        style = {**look.line(), "ms": 5, "lw": 1.4, "label": name}
        if name.startswith("ar on "):
            style |= {"ls": "--", "label": f"{name} (cross-profile)"}
        tbt = [row["tbt_ms_mean"] for row in points]
        speed.plot(tbt, [row["throughput_tokens_per_s"] for row in points], **style)
        for x, row in zip(tbt, points, strict=True):
            place = (x, row["throughput_tokens_per_s"])
            text = str(row["batch_size"])
            speed.annotate(text, place, (4, 4), textcoords="offset points", fontsize=7)
        tail.plot(sizes, [row["tbt_ms_p99"] for row in points], **style)
        means = [row.get("tbt_ms_request_p99") for row in points]
        if None not in means:
            tail.plot(sizes, means, color=look.color, ls=":", lw=1.2)
    tail.set_xscale("log", base=2)
    sizes = sorted({row["batch_size"] for row in rows})
    tail.set_xticks(sizes, [str(size) for size in sizes])
    title = "as Fig. 16; figures beside points: batch size"
    x, y = "mean time between tokens of a request (ms)", "throughput (tokens per second)"
    tidy(speed, xlabel=x, ylabel=y, title=title, ylim=(0, None))
    title = "as Fig. 17: over tokens; dotted: over requests' means"
    y = "99th percentile of the time between tokens (ms)"
    tidy(tail, xlabel="batch size", ylabel=y, title=title, ylim=(0, None))
    tail.legend(fontsize=7.5, frameon=False)
    loops = percent(next((r["loop_share"] for r in rows if r.get("loop_share") is not None), None))
    title = f"Batch sizes compared: {title_of(conditions)}, loop_share {loops}"
    return png(figure, fill(title, 118))


def curves_markdown(
    rows: Sequence[Row],
    conditions: Mapping[str, Any],
    crossovers: Mapping[str, int | None],
    cross: str | None,
    remarks: Sequence[str] = (),
) -> str:
    """Formats the page: every row at every batch size, ratios and conditions.

    Args:
        crossovers: see ``specdec.runs.batch_sizes.crossovers``.
        cross: name of the row on another profile; None without one.
        remarks: lines below the table.
    """
    columns = [COLUMNS[0], *used_columns(rows, _COLUMNS), COLUMNS[-1]]
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    lines = [f"# Batch sizes compared: {title_of(conditions)}", ""]
    lines += markdown_lines(columns, sorted(rows, key=lambda r: names.index(r["strategy"])))
    lines += ["", "Ratios are within a batch size; above 1 the row is better."]
    if cross is not None:
        lines.append(
            f"`{cross}` is cross-profile: another engine's stage times, so the ratios over it"
            " (x cross) mix strategy and engine, as the paper's do."
        )
    lines += ["", *remarks, "", "From which batch size on throughput is behind:", ""]
    lines += [f"- {what}: {NONE if at is None else at}" for what, at in crossovers.items()]
    lines += ["", "## Conditions", ""]
    lines += [f"- {key}: {value}" for key, value in conditions.items()]
    return "\n".join(lines) + "\n"
