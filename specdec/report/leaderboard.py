"""A page of rankings from result folders of any machines: a table per model, data and machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specdec.errors import UserError
from specdec.files import write_text
from specdec.report.page import load_report
from specdec.report.results import Result, read_json
from specdec.report.tables import COLUMNS, Row, best_row, title_of
from specdec.trace.files import html_template

_SHOWN = ("lossless", "tokens/s", "vs ar", "TTFT ms", "accept len", "runtime")
_OF_ROWS = ("backend", "draft", "executor")  # conditions that differ between rows of a table


def write_leaderboard(folders: Iterable[str | Path], path: Path) -> Path:
    """Ranks the complete runs under ``folders`` that share model, data, sampling and machine.

    Each row links the folder of its run, relative to the page. Rows without a speed-up are last.

    Raises:
        UserError: no run in any folder is complete.
    """
    tables: dict[str, list[tuple[Row, str]]] = {}
    for folder in folders:
        report = load_report(folder)
        complete = [result for result in report.results if result.summary is not None]
        for result, row in zip(complete, report.rows, strict=True):
            link = quote(Path(os.path.relpath(result.folder, path.parent)).as_posix())
            tables.setdefault(_title(result), []).append((row, link))
    if not tables:
        raise UserError("no run in these folders is complete: there is nothing to rank")
    for rows in tables.values():
        best = best_row([row for row, _ in rows])
        rows[:] = [({**row, "fastest": row is best}, link) for row, link in rows]
        rows.sort(key=lambda found: -(found[0].get("speedup_wall") or 0.0))
    columns = [column for column in COLUMNS if column.heading in _SHOWN]
    page = html_template("specdec.report", "leaderboard.html")
    return write_text(path, page.render(tables=tables, columns=columns, name=COLUMNS[0].cell))


def _title(result: Result) -> str:
    shared = {k: v for k, v in result.conditions.items() if k not in _OF_ROWS}
    hardware: Mapping[str, Any] = (read_json(result.folder / "provenance.json") or {}).get(
        "hardware", {}
    )
    chips = hardware.get("gpus") or [f"{hardware.get('cpu', 'CPU')}, {hardware.get('cores')} cores"]
    return f"{title_of(shared)}; {', '.join(map(str, chips))}"
