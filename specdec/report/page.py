"""One HTML page per folder of results: table, pictures, coloured texts, timeline; no network."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from specdec.errors import UserError
from specdec.files import write_bytes, write_text
from specdec.metrics import Run, comparison_row
from specdec.report.origins import (
    ENDS_FILE,
    PALETTE,
    html_text,
    origin_names,
    origins_png,
    shares,
)
from specdec.report.result_plots import Curve, acceptance_png, prompts_png, throughput_png
from specdec.report.results import Result, partner, read
from specdec.report.tables import COLUMNS, notes_of, title_of, used_columns
from specdec.trace.files import TIMELINE_FILE, TREES_FILE
from specdec.trace.page import commit_kinds, tree_page
from specdec.trace.timeline import timeline_png

PAGE_FILE = "report.html"
PICTURES = "pictures"

_MAX_TEXTS = 24  # strategies or jobs whose texts are shown
_MAX_PICTURES = 8  # of them, those whose text is also a picture
_MAX_TREES_BYTES = 12_000_000
_SECTIONS = (
    ("prompts", "Speed per prompt"),
    ("throughput", "Throughput"),
    ("acceptance", "Acceptance by depth and position"),
    ("timeline", "Timeline of all ranks"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """What a folder's results say.

    Attributes:
        folder: where they were read from.
        results: per strategy and run folder.
        rows: table rows, as ``metrics.comparison_row`` makes them; without interrupted runs.
        ends: per result its texts' ends, prompt id -> ``token_ends``.
    """

    folder: Path
    results: tuple[Result, ...]
    rows: tuple[Mapping[str, Any], ...]
    ends: tuple[Mapping[str, Sequence[int]], ...]

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Those of the first complete run."""
        return next((r.conditions for r in self.results if r.conditions), {})

    @property
    def unfinished(self) -> list[str]:
        """Names of runs that were interrupted or have failed."""
        return [r.name for r in self.results if r.summary is None]


def load_report(folder: str | Path) -> Report:
    """Reads a folder; rows of a sweep are held against the ``ar`` job of the same conditions.

    Raises:
        UserError: see ``specdec.report.results.read``; or nothing has finished yet.
    """
    results = read(folder)
    if not any(result.records for result in results):
        raise UserError(f"{folder}: no prompt has finished yet; there is nothing to report")
    rows = [_row(result, results) for result in results if result.summary is not None]
    ends = [_ends(result) for result in results]
    return Report(Path(folder), tuple(results), tuple(rows), tuple(ends))


def write_report(report: Report, *, num_texts: int = 4) -> list[Path]:
    """Writes ``report.html`` and the pictures in it; returns their paths.

    Args:
        report: from ``load_report``.
        num_texts: prompts per strategy whose text is shown.
    """
    pictures = _pictures(report)
    paths = [
        write_bytes(report.folder / PICTURES / f"{name}.png", data)
        for name, data in pictures.items()
    ]
    return [write_text(report.folder / PAGE_FILE, _page(report, pictures, num_texts)), *paths]


def _row(result: Result, among: Sequence[Result]) -> Mapping[str, Any]:
    """The table's row: a comparison's own, or made from the run and its plain decoding."""
    assert result.summary is not None
    if "speedup_wall" in result.summary:
        return result.summary
    plain = _plain_runs(result, among)
    claims = str(result.summary.get("claims", "token"))
    row = comparison_row(result.name, result.runs(), plain or None, claims=claims)
    return {**row, "loop_share": result.summary.get("loop_share")}  # a replay's is the record's


def _plain_runs(result: Result, among: Sequence[Result]) -> list[Run]:
    """Plain decoding's repeats; in a comparison those of its own folder, whatever their devices."""
    if "speedup_wall" in (result.summary or {}):
        among = [r for r in among if r.folder == result.folder]
        found = next((r for r in among if r.strategy == "ar"), None)
    else:
        found = partner(result, among)
    runs = found.runs() if found is not None else []
    return runs if len(runs) == len(result.runs()) else []


def _ends(result: Result) -> Mapping[str, Sequence[int]]:
    path = result.folder / ENDS_FILE
    if not path.is_file():
        return {}
    found: Mapping[str, Sequence[int]] = json.loads(path.read_text(encoding="utf-8")).get(
        result.strategy, {}
    )
    return found


def _pictures(report: Report) -> dict[str, bytes]:
    """Name of a file -> its content."""
    curves = [
        Curve(
            label=result.name,
            runs=result.runs(),
            plain=_plain_runs(result, report.results),
            is_plain=result.strategy == "ar",
            acceptance=(result.summary or {}).get("acceptance_by_depth") or {},
            judged=(result.summary or {}).get("judged_by_depth") or {},
        )
        for result in report.results
        if result.records
    ]
    clock = str(report.conditions.get("clock", "measured"))
    found = {
        "prompts": prompts_png(curves, clock),
        "throughput": throughput_png(curves, clock),
        "acceptance": acceptance_png(curves),
    }
    timeline = _timeline(report)
    if timeline is not None:
        found["timeline"] = timeline
    for i, (result, ends) in enumerate(zip(report.results, report.ends, strict=True)):
        if result.results and i < _MAX_PICTURES:
            first = result.results[0]
            name = f"text-{i + 1:02d}-{result.strategy}"
            title = f"{result.name}, prompt {first.id}"
            names = origin_names(result.config)
            found[name] = origins_png(first, ends.get(str(first.id)), names, title=title)
    return found


def _timeline(report: Report) -> bytes | None:
    """The timeline of the first traced run."""
    for result in report.results:
        trace, trees = (_json(result.folder / name) for name in (TIMELINE_FILE, TREES_FILE))
        if trace and trees:
            try:
                commits = commit_kinds(trees)
                return timeline_png(trace, commits=commits, title=result.name)
            except ValueError:  # no step is on record
                return None
    return None


def _page(report: Report, pictures: Mapping[str, bytes], num_texts: int) -> str:
    template = resources.files("specdec.report").joinpath("page.html").read_text("utf-8")
    body = [
        _head(report),
        _table(report.rows),
        *(
            f'<h2 id="{name}">{escape(title)}</h2>\n{_image(pictures[name], title)}'
            for name, title in _SECTIONS
            if name in pictures
        ),
        _trees(report),
        _texts(report, num_texts),
        _provenance(report),
    ]
    values = {
        "TITLE": escape(f"{report.folder.resolve().name}: results"),
        "COLORS": "\n".join(f".o{i} {{ background: {c}; }}" for i, c in enumerate(PALETTE)),
        "BODY": "\n".join(body),
    }
    for key, value in values.items():
        mark = f"<!--{key}-->" if key != "COLORS" else "/*COLORS*/"
        assert mark in template, f"the page has a place for {key}"
        template = template.replace(mark, value)
    return template


def _head(report: Report) -> str:
    complete = len(report.rows)
    lines = [
        f"<h1>{escape(report.folder.resolve().name)}</h1>",
        f"<p>{escape(title_of(report.conditions))}; {complete} complete"
        f" run{'s' if complete != 1 else ''}.</p>",
    ]
    if report.unfinished:
        names = ", ".join(report.unfinished)
        lines.append(f'<p class="bad">Not complete, not in the table: {escape(names)}.</p>')
    for record in _json(report.folder / "sweep.json") or ():
        if record["status"] not in ("ok", "skipped"):
            said = f"{record['job']} ({record['status']}): {record['error']}"
            lines.append(f'<p class="bad">{escape(said)}</p>')
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    columns = used_columns(rows)
    head = "".join(f'<th title="{escape(c.about)}">{escape(c.heading)}</th>' for c in columns)
    lines = [f"<table><tr>{head}</tr>"]
    for row in rows:
        cells = "".join(
            f"<td{'' if c in COLUMNS[:2] else ' class=n'}>{escape(c.cell(row))}</td>"
            for c in columns
        )
        lines.append(f"<tr>{cells}</tr>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in notes_of(rows))
    return "\n".join([*lines, "</table>", f"<ul>{notes}</ul>" if notes else ""])


def _image(data: bytes, title: str) -> str:
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{b64encode(data).decode()}">'


def _trees(report: Report) -> str:
    """The trees step by step, as a page within the page."""
    for result in report.results:
        path = result.folder / TREES_FILE
        if not path.is_file():
            continue
        if path.stat().st_size > _MAX_TREES_BYTES:
            return f"<p>The trees are too many for this page: specdec trace {result.folder}</p>"
        trees = _json(path)
        if trees and any(request["steps"] for request in trees["requests"]):
            page = escape(tree_page(trees, title=result.name), quote=True)
            return (
                '<h2 id="trees">Token trees, step by step</h2>\n'
                f'<iframe title="token trees" loading="lazy" srcdoc="{page}"></iframe>'
            )
    return ""


def _texts(report: Report, num_texts: int) -> str:
    """Outputs with every token in the colour of its source."""
    lines = ['<h2 id="texts">Who proposed which token</h2>']
    for i, (result, ends) in enumerate(zip(report.results, report.ends, strict=True)):
        if not result.results or i >= _MAX_TEXTS:
            continue
        names = origin_names(result.config)
        legend = " ".join(
            f'<span class="key{"" if o < 0 else f" o{o % len(PALETTE)}"}">'
            f"{escape(names.get(o, f'source {o}'))} {100 * share:.0f} %</span>"
            for o, share in shares(result.results).items()
        )
        opened = " open" if len(report.results) == 1 or i == 1 else ""
        lines.append(f"<details{opened}><summary>{escape(result.name)} {legend}</summary>")
        for found in result.results[:num_texts]:
            text = html_text(found, ends.get(str(found.id)))
            lines.append(f"<h3>prompt {found.id}</h3><pre>\n{text}</pre>")
        more = len(result.results) - num_texts
        lines.append(f"<p>{more} more prompts are in requests.jsonl.</p>" if more > 0 else "")
        lines.append("</details>")
    return "\n".join(lines)


def _provenance(report: Report) -> str:
    lines = ['<h2 id="provenance">Where this comes from</h2>']
    done: set[Path] = set()
    for result in report.results:
        if result.folder in done:
            continue
        done.add(result.folder)
        found = _json(result.folder / "provenance.json")
        text = yaml.safe_dump({"config": result.config, "provenance": found}, sort_keys=False)
        name = result.folder.name
        lines.append(f"<details><summary>{escape(name)}</summary><pre>\n{escape(text)}</pre>")
        lines.append("</details>")
    return "\n".join(lines)


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): run it again") from error


def text_of(report: Report, prompt: int) -> Iterable[tuple[Result, Any, Sequence[int] | None]]:
    """Per strategy the output of one prompt, and its texts' ends.

    Raises:
        UserError: no strategy has finished that prompt.
    """
    found = [
        (result, output, ends.get(str(output.id)))
        for result, ends in zip(report.results, report.ends, strict=True)
        for output in result.results
        if output.id == prompt
    ]
    if not found:
        known = sorted({output.id for result in report.results for output in result.results})
        raise UserError(f"text={prompt}: no such prompt; there are {known[:20]}")
    return found
