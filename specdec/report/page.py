"""Writes result pages: a folder's report, a table of a sweep's jobs, a ranking of many runs."""

import os
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any
from urllib.parse import quote

import pandas as pd
import yaml

from specdec.errors import UserError
from specdec.files import read_json, write_bytes, write_text
from specdec.metrics import comparison_row
from specdec.metrics.compare import prompt_speedups
from specdec.report import plots, tables
from specdec.report.origins import PALETTE, html_text, origin_names, shares
from specdec.report.results import Result, baseline_of, read, row_name, swept_values
from specdec.report.styles import Style, row_styles
from specdec.report.traces import rejections_png, timeline_png
from specdec.trace import files as traced

_MAX_TEXTS = 24  # strategies or jobs whose texts are shown
_MAX_TREES_BYTES = 12_000_000
_SWEPT_FIGURES = {
    "tokens_per_s": "tokens per second (decoding)",
    "speedup_wall": "speed-up over ar",
    "acceptance_length": "acceptance length (tokens per target pass)",
}
_SWEPT_BATCHES = {
    "throughput_tokens_per_s": "tokens per second of all requests",
    "tbt_ms_mean": "mean time between tokens (ms)",
}
_RANKED = ("lossless", "tokens/s", "vs ar", "TTFT ms", "accept len", "runtime")


@dataclass(frozen=True, slots=True)
class ResultsReport:
    folder: Path
    results: Sequence[Result]  # one per strategy and run folder, with its baseline
    rows: Sequence[Mapping[str, Any]]  # from ``tables.shown_rows``, one per complete result
    conditions: Mapping[str, Any]  # see ``_shared``

    @property
    def complete(self) -> list[Result]:
        return [result for result in self.results if result.summary is not None]

    @property
    def styles(self) -> dict[str, Style]:
        return row_styles({result.name: result.strategy for result in self.results})


def load_report(folder: str | Path) -> ResultsReport:
    found = read(folder)
    names = [row_name(swept_values(result.name)) or result.name for result in found]
    if len({*names}) == len(names):
        found = [replace(result, name=name) for result, name in zip(found, names, strict=True)]
    if not any(result.records for result in found):
        raise UserError(f"{folder}: no prompt has finished yet; there is nothing to report")
    results = [replace(result, plain=baseline_of(result, found)) for result in found]
    conditions = _shared([result.conditions for result in results if result.conditions])
    rows = [_row(result, result.summary) for result in results if result.summary is not None]
    return ResultsReport(Path(folder), results, tables.shown_rows(rows, conditions), conditions)


def _shared(conditions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    for key in dict.fromkeys(key for each in conditions for key in each):
        values = list(dict.fromkeys(str(each.get(key)) for each in conditions))
        if len(values) == 1:
            shared[key] = conditions[0][key]
        elif key in tables.TITLE_KEYS:
            mappings = any(isinstance(each.get(key), Mapping) for each in conditions)
            shared[key] = "several" if mappings else " or ".join(values)
    return shared


def _row(result: Result, summary: Mapping[str, Any]) -> Mapping[str, Any]:
    if "speedup_wall" in summary:
        return summary
    claims = str(summary.get("claims", "token"))
    row = comparison_row(result.name, result.runs, result.plain or None, claims=claims)
    # These are not in the counts of requests; a replay's loop_share is that of the recorded run.
    further = ("loop_share", "runtime", "caveat", "disturbed", "disturbed_because")
    return {**row, **{name: summary[name] for name in further if name in summary}}


def write_page(report: ResultsReport, *, num_texts: int = 4) -> list[Path]:
    results = [result for result in report.results if result.records]
    timeline, trees = _trace(report)
    drawn: dict[str, bytes | None] = {}
    if complete := report.complete:
        points = [prompt_speedups(r.runs, r.plain if r.strategy != "ar" else ()) for r in complete]
        styles = [report.styles[result.name] for result in complete]
        drawn["prompts"] = plots.comparison_png(report.rows, report.conditions, styles, points)
    drawn |= plots.progress_pngs(results, report.conditions) | timeline
    pictures = {name: data for name, data in drawn.items() if data is not None}
    folder = report.folder / "pictures"
    paths = [write_bytes(folder / f"{name}.png", data) for name, data in pictures.items()]
    page = _page(report, pictures, trees, num_texts)
    return [write_text(report.folder / "report.html", page), *paths]


def _trace(report: ResultsReport) -> tuple[dict[str, bytes | None], dict[str, Any]]:
    """Returns pictures (name -> PNG) of the first traced run, and its folder and page of trees."""
    for result in report.results:
        path = result.folder / traced.TREES_FILE
        trees = read_json(path)
        if not trees or not any(request["steps"] for request in trees["requests"]):
            continue
        title = f"{result.name}\n{fill(tables.title_of(result.conditions), 150)}"
        pictures: dict[str, bytes | None] = {"rejections": rejections_png(trees, title=title)}
        if trace := read_json(result.folder / traced.TIMELINE_FILE):
            kinds = traced.commit_kinds(trees)
            pictures["timeline"] = timeline_png(trace, commits=kinds, title=title)
        shown: dict[str, Any] = {"folder": result.folder}
        if path.stat().st_size <= _MAX_TREES_BYTES:
            shown["page"] = traced.tree_page(trees, title=result.name)
        return pictures, shown
    return {}, {}


def _page(
    report: ResultsReport, pictures: Mapping[str, bytes], trees: Mapping[str, Any], num_texts: int
) -> str:
    path, results = report.folder / "sweep.json", report.results
    jobs = read_json(path, object) or []
    if not (isinstance(jobs, list) and all(isinstance(j, dict) and "status" in j for j in jobs)):
        raise UserError(f"{path} is damaged (it is no list of jobs): delete it, or run it again")
    styles = report.styles
    colors = list(dict.fromkeys(style.color for style in styles.values()))
    provenance: dict[Path, str] = {}  # run folder -> its configuration and provenance, as YAML
    for result in results:
        origin = read_json(result.folder / "provenance.json")
        parts = {"config": result.config, "provenance": origin}
        provenance.setdefault(result.folder, yaml.safe_dump(parts, sort_keys=False))
    return traced.html_template("specdec.report", "page.html").render(
        name=report.folder.resolve().name,
        palette=PALETTE,
        conditions=tables.title_of(report.conditions, report.rows),
        unfinished=[result.name for result in results if result.summary is None],
        failed_jobs=[job for job in jobs if job["status"] not in ("ok", "skipped")],
        rows=report.rows,
        row_colors=[colors.index(styles[result.name].color) for result in report.complete],
        colors=colors,
        columns=tables.used_columns(report.rows),
        notes=tables.notes_of(report.rows),
        pictures={name: b64encode(data).decode() for name, data in pictures.items()},
        trees=trees,
        results=results[:_MAX_TEXTS],
        num_texts=num_texts,
        shares=shares,
        origin_names=origin_names,
        html_text=html_text,
        provenance=provenance,
    )


def write_sweep(folder: Path) -> None:
    """Prints and writes a table of a sweep's jobs; plots them over the first numeric swept key."""
    report = load_report(folder)
    if not report.rows:
        return
    advice = [f"Next: specdec report {folder}, a page with more pictures."]
    tables.print_table(report.rows, report.conditions, advice=advice)
    write_text(folder / "sweep.md", tables.markdown_table(report.rows, report.conditions))
    if picture := _swept_png(report):
        write_bytes(folder / "sweep.png", picture)


def _swept_png(report: ResultsReport) -> bytes | None:
    """Plots metrics over the first numeric swept key, a curve per combination of the others."""
    keys = pd.DataFrame([swept_values(result.folder.name) for result in report.complete])
    numbers = keys.drop(columns="seed", errors="ignore").apply(pd.to_numeric, errors="coerce")
    swept = [key for key in numbers if numbers[key].notna().all() and numbers[key].nunique() > 1]
    if not swept:
        return None
    key, others = swept[0], keys.drop(columns=swept[0]).fillna("")
    labels = [row_name(dict(values)) or "all" for _, values in others.iterrows()]
    table = pd.DataFrame([*report.rows]).assign(at=numbers[key], label=labels)
    figures = _SWEPT_BATCHES if key == "batch_size" else _SWEPT_FIGURES
    shown = [name for name in figures if name in table and table[name].notna().any()]
    figure = plots.figure_of(4.2 * len(shown), 3.8)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    strategies = [result.strategy for result in report.complete]
    styles = row_styles(dict(zip(labels, strategies, strict=True)))
    whole = bool((table["at"] % 1 == 0).all())
    for ax, name in zip(axes, shown, strict=True):
        for label, own in [*table.groupby("label", sort=False)][: plots.MAX_CURVES]:
            line = own.sort_values("at")
            ax.plot(line["at"], line[name].astype(float), label=label, ms=4, **styles[label].line())
        plots.tidy(ax, xlabel=key, ylabel=figures[name])
        ax.set_ylim(0, 1.1 * table[name].max())
        ax.locator_params(axis="x", integer=whole)
    legend = axes if {*labels} != {"all"} else ()
    return plots.png(figure, f"Sweep over {key}", report.conditions, legend)


def write_leaderboard(folders: Iterable[str | Path], path: Path) -> Path:
    """Ranks the complete runs that share model, data, sampling and machine; UserError without any.

    Each row links the folder of its run, relative to the page. Rows without a speed-up are last.
    """
    ranked: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    for report in map(load_report, folders):
        for result, row in zip(report.complete, report.rows, strict=True):
            link = quote(Path(os.path.relpath(result.folder, path.parent)).as_posix())
            ranked.setdefault(_ranking_title(result), []).append((row, link))
    if not ranked:
        raise UserError("no run in these folders is complete: there is nothing to rank")
    for rows in ranked.values():
        best = tables.best_row([row for row, _ in rows])
        rows[:] = [({**row, "fastest": row is best}, link) for row, link in rows]
        rows.sort(key=lambda found: -(found[0].get("speedup_wall") or 0.0))
    columns = [column for column in tables.COLUMNS if column.heading in _RANKED]
    template = traced.html_template("specdec.report", "leaderboard.html")
    page = template.render(tables=ranked, columns=columns, name=tables.COLUMNS[0].cell)
    return write_text(path, page)


def _ranking_title(result: Result) -> str:
    differing = ("backend", "draft", "executor")  # between rows of a table
    shared = {k: v for k, v in result.conditions.items() if k not in differing}
    hardware = (read_json(result.folder / "provenance.json") or {}).get("hardware", {})
    chips = hardware.get("gpus") or [f"{hardware.get('cpu', 'CPU')}, {hardware.get('cores')} cores"]
    return f"{tables.title_of(shared)}; {', '.join(map(str, chips))}"
