"""Compares a plan with a real run of its first choice, and says which input was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.planning.search import drawn_units, effective, interval
from specdec.planning.simulate import Unit, unit_of
from specdec.report.requests import read_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A metric of plan and run; ``low`` to ``high`` is the 95 % interval of such a run."""

    name: str
    planned: float
    low: float
    high: float
    measured: float

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high

    def told(self) -> str:
        where = "inside" if self.is_inside else "OUTSIDE"
        return (
            f"{self.name}: planned {self.planned:.3f} ({self.low:.3f} to {self.high:.3f}), run"
            f" {self.measured:.3f}, {where}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    """The result of a check; ``warnings`` say which input is wrong."""

    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return not self.warnings

    def to_json(self) -> dict[str, Any]:
        return {"figures": [asdict(f) for f in self.figures], "warnings": list(self.warnings)}


def expectation(
    units: Sequence[Unit], *, requests: int, drawn: bool, error: float
) -> dict[str, Any]:
    """Returns what ``check_run`` needs to know: results of the first choice, and their uncertainty.

    ``error`` is the relative error of the machine's times; for the others see ``search.effective``.
    """
    return {
        "units": [asdict(unit) for unit in units],
        "requests": requests,
        "drawn": drawn,
        "error": error,
    }


def check_run(expected: Mapping[str, Any], run: Sequence[Unit]) -> PlanVerdict:
    """Compares a run of the first choice with ``expected``, the result of ``expectation``.

    The intervals are those of as many prompts as the run has, drawn anew (bootstrap over the plan's
    prompts, with the law's own uncertainty). Those of times are widened by the error of the
    machine's times. A warning blames the law or record if acceptance is outside, and the profile if
    the time per answer is.
    """
    units = [Unit(**values) for values in expected["units"]]
    carried = effective(len(units), int(expected["requests"]), bool(expected["drawn"]))
    picks = drawn_units(len(units), 1.0 / (1.0 / carried + 1.0 / len(run)))
    error = float(expected["error"])

    def figure(name: str, above: str, below: str, scale: float, spread: float) -> Figure:
        planned, here = _values(units), _values(run)
        values = planned[above][picks].sum(axis=1) / np.maximum(
            planned[below][picks].sum(axis=1), 1.0
        )
        low, high = interval(scale * values)
        return Figure(
            name=name,
            planned=scale * float(planned[above].sum() / max(planned[below].sum(), 1.0)),
            low=low * (1.0 - spread),
            high=high * (1.0 + spread),
            measured=scale * float(here[above].sum() / max(here[below].sum(), 1.0)),
        )

    time = figure("ms per token", "seconds", "tokens", 1e3, error)
    emitted = figure("tokens per answer", "emitted", "answers", 1.0, 0.0)
    hits = figure("hit rate", "hits", "answers", 1.0, 0.0)
    answer = figure("ms per answer", "seconds", "later_answers", 1e3, error)
    # Answers about whole trees have no hits, and no refills after misses.
    whole = not any(unit.hits for unit in units)
    return PlanVerdict(
        figures=(time, emitted, hits, answer),
        warnings=tuple(_warnings(time, [emitted, hits], answer, whole)),
    )


def _values(units: Sequence[Unit]) -> dict[str, np.ndarray]:
    """Returns count name -> float64[U]."""
    names = ("tokens", "seconds", "emitted", "answers", "hits", "requests")
    of = {name: np.array([getattr(unit, name) for unit in units], float) for name in names}
    # Decode phases begin with the first answer, which therefore has no time.
    return {**of, "later_answers": of["answers"] - of["requests"]}


def _warnings(time: Figure, acceptance: Sequence[Figure], answer: Figure, whole: bool) -> list[str]:
    """Returns warnings that say which input is wrong.

    A time per answer depends on the profile alone if answers are of whole trees. Otherwise it
    includes refills after misses, so it does not test the profile if the hits disagree.
    """
    found = []
    outside = [figure for figure in acceptance if not figure.is_inside]
    if outside:
        found.append(
            f"WARNING: acceptance disagrees with the law ({outside[0].told()}): plan again with a"
            " record or log of this workload"
        )
    if not answer.is_inside and (whole or not outside):
        slow = answer.measured / answer.planned
        found.append(
            f"WARNING: times disagree with the profile by {slow:.2f} ({answer.told()}): measure"
            " the profile again, or correct the described machine"
        )
    if not time.is_inside and not found:
        found.append(f"WARNING: {time.told()}: the plan does not hold for this run")
    return found


def units_of_run(folder: Path) -> list[Unit]:
    """Reads the requests of a complete run that decoded one request at a time."""
    if not (folder / "summary.json").is_file():
        raise UserError(
            f"check={folder} has no summary.json: give the folder of a complete `specdec run`, or"
            " check=true to run the first choice here"
        )
    records = read_requests(folder / "requests.jsonl")
    alone = [record for record in records if record.totals is not None]
    if not alone or len(alone) < len(records):
        raise UserError(
            f"check={folder} has requests that shared steps: check with a run of batch_size=1"
        )
    return [unit_of([r.result], r.totals) for r in alone if r.totals is not None]
