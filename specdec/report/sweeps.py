"""The summary of a sweep: one table of its complete jobs, and curves over a swept number."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from specdec.files import write_bytes, write_text
from specdec.report.page import ResultsReport, load_report
from specdec.report.plots import MAX_CURVES, figure_of, png, tidy
from specdec.report.results import row_name, swept_values
from specdec.report.styles import row_styles
from specdec.report.tables import markdown_table, print_table

TABLE_FILE, PLOT_FILE = "sweep.md", "sweep.png"

_FIGURES = {
    "tokens_per_s": "tokens per second (decoding)",
    "speedup_wall": "speed-up over ar",
    "acceptance_length": "acceptance length (tokens per target pass)",
}


def write_sweep(folder: Path) -> None:
    """Prints and writes the table and, if a swept key is a number, the curves."""
    report = load_report(folder)
    if not report.rows:
        return
    advice = [f"Next: specdec report {folder}, a page with more pictures."]
    print_table(report.rows, report.conditions, advice=advice)
    write_text(folder / TABLE_FILE, markdown_table(report.rows, report.conditions))
    if picture := curves_png(report):
        write_bytes(folder / PLOT_FILE, picture)


def curves_png(report: ResultsReport) -> bytes | None:
    """Plots figures over the first swept key whose values are numbers; None if there is none.

    Jobs that agree in the other keys are one curve.
    """
    complete = [result for result in report.results if result.summary is not None]
    keys = pd.DataFrame([swept_values(result.folder.name) for result in complete])
    numbers = keys.drop(columns="seed", errors="ignore").apply(pd.to_numeric, errors="coerce")
    swept = [key for key in numbers if numbers[key].notna().all() and numbers[key].nunique() > 1]
    if not swept:
        return None
    key, others = swept[0], keys.drop(columns=swept[0]).fillna("")
    labels = [row_name(dict(values)) or "all" for _, values in others.iterrows()]
    table = pd.DataFrame([*report.rows]).assign(at=numbers[key], label=labels)
    shown = [name for name in _FIGURES if name in table and table[name].notna().any()]
    figure = figure_of(4.2 * len(shown), 3.8)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    strategies = dict(zip(labels, (result.strategy for result in complete), strict=True))
    styles = row_styles(strategies)
    whole = bool((table["at"] % 1 == 0).all())
    for ax, name in zip(axes, shown, strict=True):
        for label, own in [*table.groupby("label", sort=False)][:MAX_CURVES]:
            line = own.sort_values("at")
            ax.plot(line["at"], line[name].astype(float), label=label, ms=4, **styles[label].line())
        tidy(ax, xlabel=key, ylabel=_FIGURES[name])
        ax.set_ylim(0, 1.1 * table[name].max())
        ax.locator_params(axis="x", integer=whole)
    return png(figure, f"Sweep over {key}", report.conditions, axes if {*labels} != {"all"} else ())
