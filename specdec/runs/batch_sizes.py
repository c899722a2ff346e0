"""Plots throughput against time between tokens over batch sizes (SpecPipe Fig. 16 and 17)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import write_bytes, write_json, write_text
from specdec.report.batch_curves import curves_markdown, curves_png
from specdec.report.results import read_object
from specdec.runs.jobs import Progress, compare_jobs

Row = dict[str, Any]


def curve_jobs(
    cfgs: Mapping[int, list[dict[str, Any]]],
    folder: Path,
    repeats: int,
    progress: Progress,
    *,
    cross: str | None = None,
    remarks: Callable[[Sequence[Row]], list[str]] | None = None,
) -> dict[str, Any]:
    """Compares the same strategies at every batch size and draws the curves.

    Args:
        cfgs: batch size -> one resolved configuration per row.
        folder: receives a comparison's folder per batch size, and comparison.json, .md and .png of
            all of them. Batch sizes that are complete there are not run again.
        cross: name of the row that is ``ar`` on another profile.
        remarks: makes further lines of comparison.md from the rows.

    Returns:
        The content of ``comparison.json``.
    """
    rows: list[Row] = []
    conditions: dict[str, Any] = {}
    for size, configs in cfgs.items():
        subfolder = folder / f"batch_{size}"
        finished = subfolder / "comparison.json"
        if finished.is_file():
            comparison = read_object(finished) or {}
        else:
            comparison = compare_jobs(configs, subfolder, repeats, progress)
        if not {"rows", "conditions"} <= comparison.keys():
            raise UserError(f"{finished} is damaged (it has no rows): delete it and run it again")
        conditions = dict(comparison["conditions"])
        rows += [{**row, "batch_size": size} for row in comparison["rows"]]
    conditions["batch_size"] = list(cfgs)
    add_ratios(rows, cross)
    crossed = crossovers(rows, cross)
    result = {"rows": rows, "conditions": conditions, "crossovers": crossed}
    lines = [] if remarks is None else remarks(rows)
    page = curves_markdown(rows, conditions, crossed, cross, lines)
    write_text(folder / "comparison.md", page)
    write_bytes(folder / "comparison.png", curves_png(rows, conditions))
    write_json(folder / "comparison.json", result)
    return result


def add_ratios(rows: Sequence[Row], cross: str | None) -> None:
    """Adds to each row its ratios within its batch size; above 1 the row is better.

    ``throughput_over_ar`` is the row's throughput over that of ``ar``; ``tbt_over_ar`` is the time
    between tokens of ``ar`` over the row's. ``throughput_over_cross`` and ``tbt_over_cross`` are
    the same against the cross-profile row.
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
    speed = {(r["strategy"], r["batch_size"]): r["throughput_tokens_per_s"] or 0.0 for r in rows}
    sizes = sorted({size for _, size in speed})
    crossed: dict[str, int | None] = {}
    for plain in filter(None, ("ar", cross)):
        for name in dict.fromkeys(row["strategy"] for row in rows):
            if name in ("ar", cross) or (plain, sizes[0]) not in speed:
                continue
            behind = [n for n in sizes if speed[name, n] < speed[plain, n]]
            ahead = [n for n in sizes if n not in behind]
            last_ahead = max(ahead, default=0)
            crossed[f"{name} behind {plain}"] = next((n for n in behind if n > last_ahead), None)
    return crossed
