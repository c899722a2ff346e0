"""Results of a reproduction, and the verdict on each claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from experiments.reproduce.stated import COUNTED, KINDS, Claim

ORIGINS = ("measured", "paced", "simulated", "formula")
"""Origin of a figure: separate columns of a table, never mixed.

measured: real models on this machine (times of its clock, or counts of its runs); paced: real
processes paced by a profile; simulated: a profile's virtual clock; formula: arithmetic on the
paper's own figures or on a law, no run.
"""

MISSING, UNDECIDED = "missing", "undecided"
INSIDE = ("inside", "holds")
OUTSIDE = ("above", "below", "does not hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of ours for a claim.

    Attributes:
        value: the figure; for a claim that is a sentence, whether it holds, None if an interval
            leaves it open.
        conditions: models, data and settings.
        low, high: 95 % interval over prompts; None if there is none.
        loop_share: loop share of its tokens; None for synthetic tokens and formulas.
    """

    claim: str
    value: float | bool | None
    origin: str
    conditions: str
    kind: str
    low: float | None = None
    high: float | None = None
    loop_share: float | None = None

    def __post_init__(self) -> None:
        assert self.origin in ORIGINS, self.origin
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
        value: float | bool | None,
        origin: str,
        conditions: str,
        *,
        kind: str = "",
        loops: float | None = None,
        interval: tuple[float | None, float | None] = (None, None),
    ) -> None:
        """Adds a ``Measure``; without a kind it is a formula by origin, else a stand-in."""
        kind = kind or ("formula" if origin == "formula" else "stand-in")
        found = {"claim": claim, "value": value, "origin": origin, "conditions": conditions}
        ends = dict(zip(("low", "high"), interval, strict=True))
        self.measures.append(Measure(**found, **ends, kind=kind, loop_share=loops))  # type: ignore[arg-type]

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
        self.tables.append(Table(title, tuple(columns), tuple(tuple(row) for row in rows)))


def verdict(claim: Claim, measure: Measure | None) -> str:
    """inside, above, below or undecided; holds or does not hold for a sentence; or missing.

    A figure with an interval is inside if all of it is, and undecided if it crosses an end of the
    window.
    """
    if measure is None:
        return MISSING
    if measure.value is None:
        return UNDECIDED
    window = claim.window
    if window.low is None or window.high is None:
        return "holds" if measure.value else "does not hold"
    least = most = float(measure.value)
    if measure.low is not None and measure.high is not None:
        least, most = measure.low, measure.high
    if window.low <= least and most <= window.high:
        return "inside"
    if most < window.low or least > window.high:
        return "below" if most < window.low else "above"
    return UNDECIDED


def kind_of(claim: Claim, measure: Measure) -> str:
    """The kind of a verdict: the claim's own where it has one, except for formulas."""
    return measure.kind if measure.kind == "formula" or not claim.kind else claim.kind


def claim_verdict(claim: Claim, measures: Sequence[Measure]) -> tuple[str, str, list[Measure]]:
    """One verdict over all figures for a claim: (verdict, kind, figures that it is about).

    Figures of the counted kinds alone decide if there are any. The verdict is inside or outside
    only if all of them agree (figures on both sides of a window do not), "missing" without figures,
    otherwise undecided.
    """
    of = of_claim(measures, claim.id)
    counted = [m for m in of if kind_of(claim, m) in COUNTED]
    shown = counted or of
    if not shown:
        return MISSING, "-", []
    kinds = [kind for kind in KINDS if kind in {kind_of(claim, m) for m in shown}]
    outcomes = {verdict(claim, measure) for measure in shown}
    if outcomes <= set(INSIDE):
        return "holds" if claim.sentence else "inside", ", ".join(kinds), shown
    if outcomes <= set(OUTSIDE) and outcomes != {"above", "below"}:
        return "does not hold" if claim.sentence else "outside", ", ".join(kinds), shown
    return UNDECIDED, ", ".join(kinds), shown


def surely(low: float | None, high: float | None, above: float = 1.0) -> bool | None:
    """Whether a figure with this interval is above a number; None if the interval crosses it."""
    if low is None or high is None or low <= above <= high:
        return None
    return low > above


def below(ends: tuple[float | None, float | None], most: float) -> bool | None:
    """Whether a figure with this interval is at most a number; None if the interval crosses it."""
    more = surely(*ends, most)
    return None if more is None else not more


def weaker(*kinds: str) -> str:
    """The kind of a figure that takes its sides from several: the last of ``KINDS``."""
    return max(kinds, key=KINDS.index)


def ratio_to_stated(claim: Claim, measure: Measure) -> str:
    """Ours over the paper's value, at both ends of a range; "" for sentences."""
    if not claim.low or not claim.high or isinstance(measure.value, bool | None):
        return ""
    if claim.low == claim.high:
        return f"{measure.value / claim.low:.2f}"
    return f"{measure.value / claim.high:.2f}-{measure.value / claim.low:.2f}"


def of_claim(measures: Sequence[Measure], claim: str) -> list[Measure]:
    return [measure for measure in measures if measure.claim == claim]


def to_json(findings: Findings) -> dict[str, Any]:
    """Plain values of everything but the picture."""
    return {
        "measures": [asdict(measure) for measure in findings.measures],
        "tables": [asdict(table) for table in findings.tables],
        "notes": findings.notes,
        "missing": findings.missing,
    }


def from_json(values: Mapping[str, Any]) -> Findings:
    """The inverse of ``to_json``."""
    findings = Findings(
        measures=[Measure(**measure) for measure in values["measures"]],
        notes=list(values["notes"]),
        missing=list(values["missing"]),
    )
    for table in values["tables"]:
        findings.table(**table)
    return findings
