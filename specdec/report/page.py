"""One self-contained HTML page per results folder: table, plots, coloured texts and timeline."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdec.errors import UserError
from specdec.files import write_bytes, write_text
from specdec.metrics import RequestResult, Run, comparison_row
from specdec.report.origins import ENDS_FILE, PALETTE, html_text, origin_names, origins_png, shares
from specdec.report.result_plots import Curve, acceptance_png, prompts_png, throughput_png
from specdec.report.results import Result, baseline_of, read, read_json
from specdec.report.tables import COLUMNS, notes_of, title_of, used_columns
from specdec.trace.files import TIMELINE_FILE, TREES_FILE
from specdec.trace.page import commit_kinds, html_template, tree_page
from specdec.trace.timeline import timeline_png

PAGE_FILE = "report.html"
PICTURES = "pictures"

_MAX_TEXTS = 24  # strategies or jobs whose texts are shown
_MAX_PICTURES = 8  # strategies or jobs whose first text is also drawn as a picture
_MAX_TREES_BYTES = 12_000_000
_SECTIONS = (
    ("prompts", "Speed per prompt"),
    ("throughput", "Throughput"),
    ("acceptance", "Acceptance by depth and position"),
    ("timeline", "Timeline of all ranks"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a folder, ready for display.

    Attributes:
        folder: the folder that was read.
        results: one per strategy and run folder.
        rows: table rows (``metrics.comparison_row``) of complete runs.
        ends: per result, prompt id -> ``token_ends``.
    """

    folder: Path
    results: tuple[Result, ...]
    rows: tuple[Mapping[str, Any], ...]
    ends: tuple[Mapping[str, Sequence[int]], ...]

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Conditions of the first complete run."""
        return next((r.conditions for r in self.results if r.conditions), {})

    @property
    def unfinished(self) -> list[str]:
        """Names of runs that were interrupted or failed."""
        return [r.name for r in self.results if r.summary is None]


def load_report(folder: str | Path) -> Report:
    """Reads a folder; jobs of a sweep are compared with its ``ar`` job of the same conditions.

    Raises:
        UserError: see ``specdec.report.results.read``; or no prompt has finished yet.
    """
    results = read(folder)
    if not any(result.records for result in results):
        raise UserError(f"{folder}: no prompt has finished yet; there is nothing to report")
    rows = [_row(result, results) for result in results if result.summary is not None]
    ends = [_ends(result) for result in results]
    return Report(Path(folder), tuple(results), tuple(rows), tuple(ends))


def write_report(report: Report, *, num_texts: int = 4) -> list[Path]:
    """Writes ``report.html`` and its pictures; returns their paths.

    Args:
        report: from ``load_report``.
        num_texts: number of prompts per strategy whose text is shown.
    """
    pictures = _pictures(report)
    paths = [
        write_bytes(report.folder / PICTURES / f"{name}.png", data)
        for name, data in pictures.items()
    ]
    return [write_text(report.folder / PAGE_FILE, _page(report, pictures, num_texts)), *paths]


def text_of(
    report: Report, prompt: int
) -> list[tuple[Result, RequestResult, Sequence[int] | None]]:
    """Per strategy, the output of one prompt and its ``token_ends``.

    Raises:
        UserError: no strategy has finished that prompt.
    """
    texts = [
        (result, output, ends.get(str(output.id)))
        for result, ends in zip(report.results, report.ends, strict=True)
        for output in result.results
        if output.id == prompt
    ]
    if not texts:
        ids = sorted({output.id for result in report.results for output in result.results})
        raise UserError(f"text={prompt}: no such prompt; there are {ids[:20]}")
    return texts


def _row(result: Result, results: Sequence[Result]) -> Mapping[str, Any]:
    """The table row: the comparison's own, or computed from the run and its baseline."""
    assert result.summary is not None
    if "speedup_wall" in result.summary:
        return result.summary
    baseline = _baseline_runs(result, results)
    claims = str(result.summary.get("claims", "token"))
    row = comparison_row(result.name, result.runs(), baseline or None, claims=claims)
    # A replay's loop_share is that of the recorded run.
    return {**row, "loop_share": result.summary.get("loop_share")}


def _baseline_runs(result: Result, results: Iterable[Result]) -> list[Run]:
    """Repeats of plain decoding; within a comparison its own ``ar`` row, whatever the devices."""
    if "speedup_wall" in (result.summary or {}):
        rows = (r for r in results if r.folder == result.folder and r.strategy == "ar")
        baseline = next(rows, None)
    else:
        baseline = baseline_of(result, results)
    runs = baseline.runs() if baseline is not None else []
    return runs if len(runs) == len(result.runs()) else []


def _ends(result: Result) -> Mapping[str, Sequence[int]]:
    ends: Mapping[str, Any] = read_json(result.folder / ENDS_FILE) or {}
    return ends.get(result.strategy, {})


def _pictures(report: Report) -> dict[str, bytes]:
    """File name without extension -> PNG."""
    curves = [
        Curve(
            label=result.name,
            runs=result.runs(),
            plain=_baseline_runs(result, report.results),
            is_plain=result.strategy == "ar",
            acceptance=(result.summary or {}).get("acceptance_by_depth") or {},
            judged=(result.summary or {}).get("judged_by_depth") or {},
        )
        for result in report.results
        if result.records
    ]
    clock = str(report.conditions.get("clock", "measured"))
    pictures = {
        "prompts": prompts_png(curves, clock),
        "throughput": throughput_png(curves, clock),
        "acceptance": acceptance_png(curves),
    }
    timeline = _timeline(report)
    if timeline is not None:
        pictures["timeline"] = timeline
    for i, (result, ends) in enumerate(zip(report.results, report.ends, strict=True)):
        if result.results and i < _MAX_PICTURES:
            first = result.results[0]
            title = f"{result.name}, prompt {first.id}"
            names = origin_names(result.config)
            png = origins_png(first, ends.get(str(first.id)), names, title=title)
            pictures[f"text-{i + 1:02d}-{result.strategy}"] = png
    return pictures


def _timeline(report: Report) -> bytes | None:
    """The timeline of the first traced run."""
    for result in report.results:
        trace, trees = (read_json(result.folder / name) for name in (TIMELINE_FILE, TREES_FILE))
        if trace and trees:
            try:
                return timeline_png(trace, commits=commit_kinds(trees), title=result.name)
            except ValueError:  # no step was recorded
                return None
    return None


def _page(report: Report, pictures: Mapping[str, bytes], num_texts: int) -> str:
    jobs = read_json(report.folder / "sweep.json") or ()
    return html_template("specdec.report", "page.html").render(
        name=report.folder.resolve().name,
        palette=PALETTE,
        conditions=title_of(report.conditions),
        unfinished=report.unfinished,
        failed_jobs=[job for job in jobs if job["status"] not in ("ok", "skipped")],
        rows=report.rows,
        columns=used_columns(report.rows),
        left_columns=COLUMNS[:2],
        notes=notes_of(report.rows),
        sections=_SECTIONS,
        pictures={name: b64encode(data).decode() for name, data in pictures.items()},
        trees=_trees(report),
        texts=_texts(report, num_texts),
        provenance=_provenance(report),
    )


def _trees(report: Report) -> dict[str, Any]:
    """``page``: trees of the first traced run as HTML; or ``folder``, if they are too large."""
    for result in report.results:
        path = result.folder / TREES_FILE
        if not path.is_file():
            continue
        if path.stat().st_size > _MAX_TREES_BYTES:
            return {"folder": result.folder}
        trees = read_json(path)
        if trees and any(request["steps"] for request in trees["requests"]):
            return {"page": tree_page(trees, title=result.name)}
    return {}


def _texts(report: Report, num_texts: int) -> list[dict[str, Any]]:
    """Per strategy or job, its outputs with each token in the colour of its source."""
    texts = []
    for i, (result, ends) in enumerate(zip(report.results, report.ends, strict=True)):
        if not result.results or i >= _MAX_TEXTS:
            continue
        names = origin_names(result.config)
        legend = [
            {
                "name": names.get(origin, f"source {origin}"),
                "percent": f"{100 * share:.0f}",
                "style": "" if origin < 0 else f" o{origin % len(PALETTE)}",
            }
            for origin, share in shares(result.results).items()
        ]
        outputs = [
            (output.id, html_text(output, ends.get(str(output.id))))
            for output in result.results[:num_texts]
        ]
        texts.append(
            {
                "name": result.name,
                "open": len(report.results) == 1 or i == 1,
                "legend": legend,
                "outputs": outputs,
                "num_more": len(result.results) - num_texts,
            }
        )
    return texts


def _provenance(report: Report) -> dict[Path, str]:
    """Run folder -> its configuration and provenance, as YAML."""
    configs = {result.folder: result.config for result in reversed(report.results)}
    return {
        folder: yaml.safe_dump(
            {"config": configs[folder], "provenance": read_json(folder / "provenance.json")},
            sort_keys=False,
        )
        for folder in dict.fromkeys(result.folder for result in report.results)
    }
