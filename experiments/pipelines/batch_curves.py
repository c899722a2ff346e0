"""``specdec compare 'batch_size=[...]'``: throughput against time between tokens over batch sizes.

SpecPipe (2504.04104 v2), Fig. 16 and 17, and the ratios of its section 4.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.reproduce.stated import read_paper
from specdec.errors import UserError
from specdec.files import write_bytes, write_json, write_text
from specdec.report.plots import figure_of, png, tidy
from specdec.report.results import read_json
from specdec.report.styles import row_styles
from specdec.report.tables import (
    COLUMNS,
    NONE,
    Column,
    conditions_lines,
    markdown_lines,
    number,
    percent,
    title_of,
    used_columns,
)
from specdec.runs.jobs import compare_jobs
from specdec.runs.progress import Progress

Row = dict[str, Any]

_COLUMNS = tuple(
    Column(heading, "", lambda row, key=key, digits=digits: number(row.get(key), digits))
    for heading, key, digits in (
        *(("batch", "batch_size", 0), ("tokens/s", "throughput_tokens_per_s", 1)),
        *(("TBT ms", "tbt_ms_mean", 1), ("p50", "tbt_ms_p50", 1), ("p95", "tbt_ms_p95", 1)),
        *(("p99", "tbt_ms_p99", 1), ("p99 of requests", "tbt_ms_request_p99", 1)),
        *(("TTFT ms", "ttft_ms", 0), ("queue ms", "queue_ms", 0), ("open", "mean_batch", 1)),
        *(("KV peak", "kv_tokens_peak", 0), ("x ar", "throughput_over_ar", 2)),
        *(("TBT x ar", "tbt_over_ar", 2), ("x cross", "throughput_over_cross", 2)),
        ("TBT x cross", "tbt_over_cross", 2),
    )
)
_STATED_SIZES = (4, 8)  # batch sizes of the paper's ratios


def curve_jobs(
    cfgs: Mapping[int, list[dict[str, Any]]],
    folder: Path,
    repeats: int,
    progress: Progress,
    *,
    cross: str | None = None,
) -> None:
    """Compares the same strategies at every batch size and draws the curves.

    Args:
        cfgs: batch size -> one resolved configuration per row.
        folder: receives a comparison's folder per batch size, and comparison.json, .md and .png of
            all. Complete batch sizes are not run again.
        cross: name of the row that is ``ar`` on another profile.
    """
    rows: list[Row] = []
    conditions: dict[str, Any] = {}
    for size, configs in cfgs.items():
        subfolder = folder / f"batch_{size}"
        finished = subfolder / "comparison.json"
        if finished.is_file():
            comparison = read_json(finished) or {}
        else:
            comparison = compare_jobs(configs, subfolder, repeats, progress)
        if not {"rows", "conditions"} <= comparison.keys():
            raise UserError(f"{finished} is damaged (it has no rows): delete it and run it again")
        conditions = dict(comparison["conditions"])
        rows += [{**row, "batch_size": size} for row in comparison["rows"]]
    conditions["batch_size"] = list(cfgs)
    add_ratios(rows, cross)
    write_text(folder / "comparison.md", curves_markdown(rows, conditions, cross))
    write_bytes(folder / "comparison.png", curves_png(rows, conditions))
    crossed = crossovers(rows, cross)
    result = {"rows": rows, "conditions": conditions, "crossovers": crossed}
    write_json(folder / "comparison.json", result)


def add_ratios(rows: Sequence[Row], cross: str | None) -> None:
    """Adds to each row its ratios within its batch size; above 1 the row is better.

    ``throughput_over_ar`` and ``tbt_over_ar`` (of the time between tokens) are over plain decoding,
    ``..._over_cross`` over the cross-profile row.
    """
    for name, suffix in (("ar", "ar"), (cross, "cross")):
        bases = {row["batch_size"]: row for row in rows if row["strategy"] == name}
        for row in rows:
            base = bases.get(row["batch_size"], {})
            speed, plain = row["throughput_tokens_per_s"], base.get("throughput_tokens_per_s")
            row[f"throughput_over_{suffix}"] = speed / plain if speed and plain else None
            tbt, plain = row["tbt_ms_mean"], base.get("tbt_ms_mean")
            row[f"tbt_over_{suffix}"] = plain / tbt if tbt and plain else None


def crossovers(rows: Sequence[Row], cross: str | None) -> dict[str, int | None]:
    """Finds the batch size from which on plain decoding has the higher throughput.

    Keys are "STRATEGY behind ar" and "STRATEGY behind CROSS". The value is None if the strategy is
    ahead at the largest size.
    """
    table = pd.DataFrame(rows).pivot_table(
        "throughput_tokens_per_s", "batch_size", "strategy", sort=False
    )
    crossed: dict[str, int | None] = {}
    for plain in (name for name in ("ar", cross) if name in table):
        for name in (name for name in table if name not in ("ar", cross)):
            ahead = table.index[table[name] >= table[plain]].max()  # NaN if it never is
            behind = [int(size) for size in table.index if not size <= ahead]
            crossed[f"{name} behind {plain}"] = min(behind, default=None)
    return crossed


def curves_png(rows: Sequence[Row], conditions: Mapping[str, Any]) -> bytes:
    """Plots throughput against time between tokens, and its p99 over batch sizes, as PNG."""
    figure = figure_of(11.0, 4.8)
    speed, tail = figure.subplots(1, 2)
    table = pd.DataFrame(rows)
    styles = row_styles(dict.fromkeys(table["strategy"].astype(str)))
    for name, points in table.groupby("strategy", sort=False):
        style = {**styles[str(name)].line(), "ms": 5, "lw": 1.4, "label": name}
        if str(name).startswith("ar on "):
            style |= {"ls": "--", "label": f"{name} (cross-profile)"}
        speed.plot(points["tbt_ms_mean"], points["throughput_tokens_per_s"], **style)
        columns = points[["batch_size", "tbt_ms_mean", "throughput_tokens_per_s"]]
        for size, *at in columns.itertuples(index=False):
            speed.annotate(str(size), at, (4, 4), textcoords="offset points", fontsize=7)
        tail.plot(points["batch_size"], points["tbt_ms_p99"], **style)
        if "tbt_ms_request_p99" in points:
            means = points["tbt_ms_request_p99"].astype(float)
            tail.plot(points["batch_size"], means, color=style["color"], ls=":", lw=1.2)
    tail.set_xscale("log", base=2)
    sizes = sorted(set(table["batch_size"]))
    tail.set_xticks(sizes, [str(size) for size in sizes])
    title = "as Fig. 16; figures beside points: batch size"
    x, y = "mean time between tokens of a request (ms)", "throughput (tokens per second)"
    tidy(speed, xlabel=x, ylabel=y, title=title, ylim=(0, None))
    title = "as Fig. 17: over tokens; dotted: over requests' means"
    y = "99th percentile of the time between tokens (ms)"
    tidy(tail, xlabel="batch size", ylabel=y, title=title, ylim=(0, None))
    tail.legend(fontsize=7.5, frameon=False)
    loops = percent(next((r["loop_share"] for r in rows if r.get("loop_share") is not None), None))
    return png(figure, f"Batch sizes compared, loop_share {loops}", conditions)


def curves_markdown(rows: Sequence[Row], conditions: Mapping[str, Any], cross: str | None) -> str:
    """Formats the page: every row at every batch size, ratios beside the paper's, conditions."""
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
    lines.append("")
    claims = read_paper("specpipe").items["fig16"].claims
    for row in rows:
        if row["strategy"] == "specpipe_db" and row["batch_size"] in _STATED_SIZES:
            lines += [
                f"- specpipe_db at batch {row['batch_size']}, {metric}:"
                f" {number(row[f'{metric}_over_ar'])}x over ar on the same profile,"
                f" {number(row[f'{metric}_over_cross'])}x cross-profile; the paper"
                f" {claims[metric].stated} over PP-vLLM"
                for metric in ("throughput", "tbt")
            ]
    lines += ["", "From which batch size on throughput is behind:", ""]
    crossed = crossovers(rows, cross).items()
    lines += [f"- {what}: {NONE if at is None else at}" for what, at in crossed]
    return "\n".join([*lines, *conditions_lines(conditions)]) + "\n"
