from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.files import write_bytes, write_json, write_text
from specdec.report.plots import comparison_png, run_png
from specdec.report.tables import markdown_table

if TYPE_CHECKING:
    from specdec.metrics.results import RequestResult, Run


def write_comparison(
    folder: str | Path,
    rows: Sequence[Mapping[str, Any]],
    conditions: Mapping[str, Any],
    runs: Mapping[str, Sequence[Run]] | None = None,
) -> list[Path]:
    """Writes comparison.json, comparison.md and comparison.png; returns their paths.

    ``rows`` are from ``metrics.comparison_row``. The plot shows the spread over prompts if ``runs``
    has the repeats of each strategy.
    """
    base = Path(folder)
    return [
        write_text(base / "comparison.md", markdown_table(rows, conditions)),
        write_bytes(base / "comparison.png", comparison_png(rows, conditions, runs)),
        write_json(base / "comparison.json", {"rows": list(rows), "conditions": conditions}),
    ]


def write_run(
    folder: str | Path,
    summary: Mapping[str, Any],
    results: Sequence[RequestResult],
    conditions: Mapping[str, Any],
) -> list[Path]:
    """Writes run.png and then summary.json (metrics and ``conditions``); returns their paths.

    The existence of summary.json marks a run as complete, so it is written last.
    """
    base = Path(folder)
    return [
        write_bytes(base / "run.png", run_png(summary, results, conditions)),
        write_json(base / "summary.json", {**summary, "conditions": conditions}),
    ]
