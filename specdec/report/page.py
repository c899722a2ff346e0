"""Renders one self-contained HTML page per results folder: table, plots, texts and timeline."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from specdec.errors import UserError
from specdec.files import write_bytes, write_text
from specdec.metrics import RequestResult, comparison_row
from specdec.metrics.compare import prompt_speedups
from specdec.report.origins import PALETTE, html_text, origin_names, shares
from specdec.report.plots import acceptance_png, comparison_png, throughput_png, trajectory_png
from specdec.report.results import (
    Result,
    baseline_of,
    read,
    read_json,
    row_name,
    styles_of,
    swept_values,
)
from specdec.report.tables import TITLE_KEYS, notes_of, shown_rows, title_of, used_columns
from specdec.report.traces import rejections_png, timeline_png
from specdec.trace.files import (
    TIMELINE_FILE,
    TREES_FILE,
    Track,
    commit_kinds,
    html_template,
    tracks_page,
    tree_page,
)

_MAX_TEXTS = 24  # strategies or jobs whose texts are shown
_MAX_TREES_BYTES = 12_000_000


@dataclass(frozen=True, slots=True)
class ResultsReport:
    folder: Path
    results: tuple[Result, ...]  # one per strategy and run folder, with its baseline
    rows: tuple[Mapping[str, Any], ...]  # of ``tables.shown_rows``, of complete runs
    conditions: Mapping[str, Any]  # see ``_shared``


def load_report(folder: str | Path) -> ResultsReport:
    found = read(folder)
    names = [row_name(swept_values(result.name)) or result.name for result in found]
    if len({*names}) == len(names):
        found = [replace(result, name=name) for result, name in zip(found, names, strict=True)]
    if not any(result.records for result in found):
        raise UserError(f"{folder}: no prompt has finished yet; there is nothing to report")
    results = []
    for result in found:
        baseline = baseline_of(result, found)
        plain = [] if baseline is None else baseline.runs
        results.append(replace(result, plain=plain if len(plain) == len(result.runs) else []))
    conditions = _shared([result.conditions for result in results if result.conditions])
    rows = [_row(result) for result in results if result.summary is not None]
    return ResultsReport(
        Path(folder), tuple(results), tuple(shown_rows(rows, conditions)), conditions
    )


def _shared(conditions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    for key in dict.fromkeys(key for each in conditions for key in each):
        values = list(dict.fromkeys(str(each.get(key)) for each in conditions))
        if len(values) == 1:
            shared[key] = conditions[0][key]
        elif key in TITLE_KEYS:
            mappings = any(isinstance(each.get(key), Mapping) for each in conditions)
            shared[key] = "several" if mappings else " or ".join(values)
    return shared


def _row(result: Result) -> Mapping[str, Any]:
    summary = result.summary
    assert summary is not None
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
    drawn: dict[str, bytes | None] = {
        "prompts": _comparison(report),
        "throughput": throughput_png(results, report.conditions),
        "acceptance": acceptance_png(results, report.conditions),
        "trajectory": trajectory_png(results, report.conditions),
        **timeline,
    }
    pictures = {name: data for name, data in drawn.items() if data is not None}
    folder = report.folder / "pictures"
    paths = [write_bytes(folder / f"{name}.png", data) for name, data in pictures.items()]
    page = _page(report, pictures, trees, num_texts)
    return [write_text(report.folder / "report.html", page), *paths]


def _comparison(report: ResultsReport) -> bytes | None:
    styles, drawn = styles_of(report.results), [r for r in report.results if r.summary is not None]
    points = [prompt_speedups(r.runs, r.plain if r.strategy != "ar" else ()) for r in drawn]
    own = [styles[result.name] for result in drawn]
    return comparison_png(report.rows, report.conditions, own, points) if drawn else None


def text_of(
    report: ResultsReport, prompt: int
) -> list[tuple[Result, RequestResult, Sequence[int] | None]]:
    outputs = [(result, output) for result in report.results for output in result.results]
    texts = [(r, o, r.ends.get(str(prompt))) for r, o in outputs if o.id == prompt]
    if not texts:
        ids = sorted({output.id for _, output in outputs})
        raise UserError(f"text={prompt}: no such prompt; there are {ids[:20]}")
    return texts


def _trace(report: ResultsReport) -> tuple[dict[str, bytes | None], dict[str, Any]]:
    """Returns the first traced run's pictures by name, and the trees of one, or of two that decode
    the same prompts.
    """
    styles, tracks = styles_of(report.results), list[Track]()
    pictures: dict[str, bytes | None] = {}
    shown: dict[str, Any] = {}
    for result in report.results:
        folder, name = result.folder, result.name
        trees = read_json(folder / TREES_FILE)
        if not trees or not any(request["steps"] for request in trees["requests"]):
            continue
        size = (folder / TREES_FILE).stat().st_size
        if not shown:
            shown = {"folder": folder}
            title = f"{name}\n{fill(title_of(result.conditions), 150)}"
            if trace := read_json(folder / TIMELINE_FILE):
                kinds = commit_kinds(trees)
                pictures["timeline"] = timeline_png(trace, commits=kinds, title=title)
            pictures["rejections"] = rejections_png(trees, title=title)
            if size > _MAX_TREES_BYTES:
                break
        if size <= _MAX_TREES_BYTES / 2 or not tracks:
            tracks.append(Track(name, trees, styles[name].color))
        if len(tracks) == 2:
            break
    if tracks:
        shown["page"] = tree_page(tracks[0].trees, title=tracks[0].title)
    if len(tracks) == 2:
        with suppress(ValueError):  # they decode other prompts
            shown["page"] = tracks_page(tracks, title=" beside ".join(t.title for t in tracks))
    return pictures, shown


def _page(
    report: ResultsReport, pictures: Mapping[str, bytes], trees: Mapping[str, Any], num_texts: int
) -> str:
    path, results = report.folder / "sweep.json", report.results
    jobs = read_json(path) or []
    if not (isinstance(jobs, list) and all(isinstance(j, dict) and "status" in j for j in jobs)):
        raise UserError(f"{path} is damaged (it is no list of jobs): delete it, or run it again")
    styles = styles_of(results)
    colors = list(dict.fromkeys(style.color for style in styles.values()))
    complete = [result.name for result in results if result.summary is not None]
    provenance: dict[Path, str] = {}  # run folder -> its configuration and provenance, as YAML
    for result in results:
        origin = read_json(result.folder / "provenance.json")
        parts = {"config": result.config, "provenance": origin}
        provenance.setdefault(result.folder, yaml.safe_dump(parts, sort_keys=False))
    return html_template("specdec.report", "page.html").render(
        name=report.folder.resolve().name,
        palette=PALETTE,
        conditions=title_of(report.conditions),
        unfinished=[result.name for result in results if result.summary is None],
        failed_jobs=[job for job in jobs if job["status"] not in ("ok", "skipped")],
        rows=report.rows,
        row_colors=[colors.index(styles[name].color) for name in complete],
        colors=colors,
        columns=used_columns(report.rows),
        notes=notes_of(report.rows),
        pictures={name: b64encode(data).decode() for name, data in pictures.items()},
        trees=trees,
        results=results[:_MAX_TEXTS],
        num_texts=num_texts,
        shares=shares,
        origin_names=origin_names,
        html_text=html_text,
        provenance=provenance,
    )
