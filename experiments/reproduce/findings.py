"""Results of a reproduction, and the verdict on each claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.reproduce.stated import Claim

KINDS = ("measured", "paced", "simulated", "formula")
"""Origin of a figure: separate columns of a table, never mixed.

measured: real models on this machine (times of its clock, or counts of its runs); paced: real
processes paced by a profile; simulated: a profile's virtual clock; formula: arithmetic on the
paper's own figures or on a law, no run.
"""

MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of ours for a claim.

    Attributes:
        claim: id of the claim.
        value: the figure; for a claim that is a sentence, whether it holds.
        kind: one of ``KINDS``.
        conditions: models, data and settings.
        low, high: 95 % interval over prompts; None if there is none.
        loop_share: loop share of its tokens; None for synthetic tokens and formulas.
    """

    claim: str
    value: float | bool
    kind: str
    conditions: str
    low: float | None = None
    high: float | None = None
    loop_share: float | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values under headings; None is printed as "-"."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(slots=True)
class Findings:
    """The return value of an item's builder.

    Attributes:
        measures: figures for the claims.
        tables: tables in order.
        figure: a matplotlib ``Figure``, PNG bytes, or None.
        notes: sentences under the tables, such as assumptions.
        missing: parts that could not be run, with the reason.
    """

    measures: list[Measure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figure: Any = None
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(
        self,
        claim: str,
        value: float | bool,
        kind: str,
        conditions: str,
        *,
        loops: float | None = None,
        interval: tuple[float | None, float | None] = (None, None),
    ) -> None:
        """Adds a ``Measure``."""
        low, high = interval
        self.measures.append(
            Measure(
                claim=claim,
                value=value,
                kind=kind,
                conditions=conditions,
                low=low,
                high=high,
                loop_share=loops,
            )
        )

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
        """Adds a ``Table``."""
        self.tables.append(Table(title, tuple(columns), tuple(tuple(row) for row in rows)))


def verdict(claim: Claim, measure: Measure | None) -> str:
    """inside, above or below; holds or does not hold for a sentence; missing without a figure.

    A range includes its ends; a single number allows the relative error ``claim.within``. Figures
    of kind "formula" have the prefix "formula check: ".
    """
    if measure is None:
        return MISSING
    if claim.low is None or claim.high is None:
        outcome = "holds" if measure.value else "does not hold"
    else:
        low, high = claim.low, claim.high
        if low == high:
            slack = abs(low) * claim.within
            low, high = low - slack, high + slack
        value = float(measure.value)
        outcome = "inside" if low <= value <= high else "above" if value > high else "below"
    return f"formula check: {outcome}" if measure.kind == "formula" else outcome


def ratio_to_stated(claim: Claim, measure: Measure) -> str:
    """Ours over the paper's value, at both ends of a range; "" for sentences."""
    if claim.low is None or not claim.low or not claim.high or isinstance(measure.value, bool):
        return ""
    if claim.low == claim.high:
        return f"{measure.value / claim.low:.2f}"
    return f"{measure.value / claim.high:.2f}-{measure.value / claim.low:.2f}"


def of_claim(measures: Sequence[Measure], claim: str) -> list[Measure]:
    """The figures for one claim."""
    return [measure for measure in measures if measure.claim == claim]


def to_json(findings: Findings) -> dict[str, Any]:
    """Plain values of everything but the picture."""
    return {
        "measures": [
            {name: getattr(m, name) for name in Measure.__dataclass_fields__}
            for m in findings.measures
        ],
        "tables": [
            {"title": t.title, "columns": list(t.columns), "rows": [list(r) for r in t.rows]}
            for t in findings.tables
        ],
        "notes": findings.notes,
        "missing": findings.missing,
    }


def from_json(values: Mapping[str, Any]) -> Findings:
    """The inverse of ``to_json``."""
    return Findings(
        measures=[Measure(**m) for m in values["measures"]],
        tables=[
            Table(t["title"], tuple(t["columns"]), tuple(tuple(r) for r in t["rows"]))
            for t in values["tables"]
        ],
        notes=list(values["notes"]),
        missing=list(values["missing"]),
    )
