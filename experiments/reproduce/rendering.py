"""Findings as Markdown and CSV."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

from experiments.reproduce.findings import (
    MISSING,
    ORIGINS,
    Findings,
    Measure,
    Table,
    claim_verdict,
    kind_of,
    of_claim,
    ratio_to_stated,
    verdict,
)
from experiments.reproduce.items import Item
from experiments.reproduce.stated import Claim
from specdec.errors import UserError

NONE = "-"
SUMMARY = ("claim", "paper", "ours", "kind", "verdict")
_MOST_CLAIMS = 12
_HEADINGS = (
    *("claim", "paper", "mark", "window and reason", *ORIGINS),
    *("ours / paper", "kind", "verdict", "loop_share", "conditions"),
)


def markdown(item: Item, findings: Findings, provenance: Mapping[str, Any]) -> str:
    title = f"# {item.id}: {item.stated.title}"
    lines = [title, "", f"{item.paper.title}, {item.paper.reference}; {item.stated.section}.", ""]
    if item.stated.claims:
        rows, more = summary_rows(item, findings)
        lines += ["## In short", "", *grid(SUMMARY, rows), "", *([f"{more}.", ""] if more else [])]
        lines += ["## Claims", "", *grid(_HEADINGS, claim_rows(item, findings)), ""]
    if item.config.get("why"):
        figures = dict.fromkeys(item.stated.claims, (item, findings))
        lines += ["Why: " + " ".join(filled(item.config["why"], figures).split()), ""]
    if item.fixed:
        fixed = {key: value for key, value in item.fixed.items() if key != "changes"}
        lines += ["Fixed before the run:", "", *(f"- {k}: {cell(v)}" for k, v in fixed.items())]
        lines += [*(f"- changed {change}" for change in item.fixed.get("changes", ())), ""]
    for table in findings.tables:
        rows = [[cell(value) for value in row] for row in table.rows]
        lines += [f"## {table.title}", "", *grid(table.columns, rows), ""]
    if findings.notes:
        lines += [*(f"- {note}" for note in findings.notes), ""]
    if findings.missing:
        lines += ["Missing:", "", *(f"- {what}" for what in findings.missing), ""]
    lines += ["## Conditions", "", *(f"- {k}: {v}" for k, v in provenance.items()), ""]
    return "\n".join(lines)


def summary_rows(item: Item, findings: Findings) -> tuple[list[tuple[str, ...]], str]:
    """Returns one row of ``SUMMARY`` per claim up to the limit, and a note on the other claims."""
    rows = []
    for claim in item.stated.claims.values():
        outcome, kind, shown = claim_verdict(claim, findings.measures)
        ours = span_text(claim, shown) if shown else NONE
        # A figure of the profile that comes back tests nothing.
        rows.append((claim.text, claim.stated, ours, kind, NONE if kind == "input" else outcome))
    left = Counter(row[-1] for row in rows[_MOST_CLAIMS:])
    text = ", ".join(f"{num} {outcome}" for outcome, num in left.items())
    more = f"and {left.total()} further claims: {text}" if left else ""
    return rows[:_MOST_CLAIMS], more


Figures = Mapping[str, tuple[Item, Findings]]
"""Name in a sentence -> the item and its findings; the claim is the part after the last slash."""


def filled(text: str, figures: Figures) -> str:
    """A sentence with figures in place of ``{claim}`` or ``{claim: words of their conditions}``.

    Without words the figures are those that decide the claim's verdict. Words are separated by
    " & "; conditions must not have those with "!" before them.

    Raises:
        UserError: a name is no claim with such a figure.
    """

    def figure(match: re.Match[str]) -> str:
        name, words = match[1], match[2]
        item, findings = figures.get(name, (None, Findings()))
        claim = item.stated.claims[name.rpartition("/")[2]] if item else None
        shown = claim_verdict(claim, findings.measures)[2] if claim else []
        if claim and words:
            of = of_claim(findings.measures, claim.id)
            shown = [m for m in of if all(_says(m.conditions, w) for w in words.split(" & "))]
        if claim is None or not shown:
            raise UserError(f"{match[0]} in {text[:60]!r} is no claim with a figure")
        return span_of(claim, shown)

    return re.sub(r"\{([a-z0-9_/]+)(?:: ([^}]+))?\}", figure, text)


def _says(conditions: str, words: str) -> bool:
    return (words.removeprefix("!") in conditions) != words.startswith("!")


def claim_rows(item: Item, findings: Findings) -> list[list[str]]:
    """One row per claim and figure of ours; a claim without a figure is "missing"."""
    return [
        _claim_row(claim, measure, item)
        for claim in item.stated.claims.values()
        for measure in of_claim(findings.measures, claim.id) or [None]
    ]


def _claim_row(claim: Claim, measure: Measure | None, item: Item) -> list[str]:
    by_origin = dict.fromkeys(ORIGINS, NONE)
    stated = [claim.text, claim.stated, claim.mark, str(claim.window)]
    if measure is None:
        why = item.reason or (item.status if item.absent else "")
        return [*stated, *by_origin.values(), "", NONE, MISSING, NONE, why]
    by_origin[measure.origin] = value_text(claim, measure)
    loops = NONE if measure.loop_share is None else f"{100 * measure.loop_share:.0f} %"
    outcome = (kind_of(claim, measure), verdict(claim, measure), loops, measure.conditions)
    return [*stated, *by_origin.values(), ratio_to_stated(claim, measure), *outcome]


def value_text(claim: Claim, measure: Measure) -> str:
    """Our figure with its unit and interval."""
    if measure.value is None:
        return "open"
    if isinstance(measure.value, bool):
        return "yes" if measure.value else "no"
    text = f"{cell(float(measure.value))}{claim.suffix}"
    if measure.low is not None and measure.high is not None:
        text += f" ({cell(measure.low)}-{cell(measure.high)})"
    return text


def span_text(claim: Claim, measures: Sequence[Measure]) -> str:
    """Our figures for a claim in one cell: the only one, the span of several, or the answers."""
    if len(measures) == 1:
        return value_text(claim, measures[0])
    if claim.sentence:
        answers = Counter("open" if m.value is None else cell(m.value) for m in measures)
        return ", ".join(f"{num} {answer}" for answer, num in answers.items())
    return f"{span_of(claim, measures)} ({len(measures)})"


def span_of(claim: Claim, measures: Sequence[Measure]) -> str:
    """Least and largest of our figures for a claim that is a number, with the unit."""
    values = sorted(float(m.value) for m in measures if m.value is not None)
    span = dict.fromkeys(cell(value) for value in (values[0], values[-1]))
    return f"{' to '.join(span)}{claim.suffix}"


def cell(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], str):
            return ", ".join(value)
        return " to ".join(cell(part) for part in value)
    if isinstance(value, float):
        size = abs(value)
        if 0.0 < size < 0.001:
            return f"{value:.2g}"
        digits = 1 if size >= 100 else 2 if size >= 1 else 3
        return f"{value:.{digits}f}"
    return str(value)


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    safe = [[str(text).replace("|", "/") for text in row] for row in rows]
    return [
        f"| {' | '.join(str(heading) for heading in headings)} |",
        f"|{'|'.join('---' for _ in headings)}|",
        *(f"| {' | '.join(row)} |" for row in safe),
    ]


def csv_text(item: Item, findings: Findings) -> str:
    """Claims, then every table, each under its own headings; empty lines between."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    tables = [Table("claims", _HEADINGS, tuple(tuple(r) for r in claim_rows(item, findings)))]
    for table in [*tables, *findings.tables]:
        writer.writerow([f"# {table.title}"])
        writer.writerow(table.columns)
        writer.writerows(["" if value is None else value for value in row] for row in table.rows)
        writer.writerow([])
    return stream.getvalue()
