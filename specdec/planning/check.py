"""Compares a plan with a real run of its first choice, and says which input was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.planning.candidates import Times, Unit, effective, interval
from specdec.report.results import read_requests


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

    def __str__(self) -> str:
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


def check_run(expected: Mapping[str, Any], run: Sequence[Unit]) -> PlanVerdict:
    """Compares a run of the first choice with ``Plan.expected``.

    The intervals are those of as many prompts as the run has, drawn anew (bootstrap over the plan's
    prompts, with the law's own uncertainty). Those of times are widened by the error of the
    machine's times. A warning blames the law or record if acceptance is outside, and the profile if
    the time per answer is.
    """
    units = [Unit(**values) for values in expected["units"]]
    num = effective(effective(len(units), expected["requests"]), len(run))

    def figure(name: str, above: str, below: str, scale: float = 1.0, error: float = 0.0) -> Figure:
        planned, measured = (Times.ratio(of, above, below, scale) for of in (units, run))
        low, high = interval(planned.resampled(num))
        bounds = {"low": low * (1.0 - error), "high": high * (1.0 + error)}
        return Figure(name=name, planned=planned.mean, measured=measured.mean, **bounds)

    error = float(expected["error"])
    time = figure("ms per token", "seconds", "tokens", 1e3, error)
    emitted = figure("tokens per answer", "emitted", "answers")
    hits = figure("hit rate", "hits", "answers")
    answer = figure("ms per answer", "seconds", "later_answers", 1e3, error)
    warnings = []
    outside = [f for f in (emitted, hits) if not f.is_inside]
    if outside:
        warnings.append(
            f"WARNING: acceptance disagrees with the law ({outside[0]}): plan again with a"
            " record or log of this workload"
        )
    # A time per answer depends on the profile alone if answers are of whole trees, which have no
    # hits. Otherwise it includes refills after misses, so it tells nothing if the hits disagree.
    if not answer.is_inside and (not outside or not any(unit.hits for unit in units)):
        warnings.append(
            f"WARNING: times disagree with the profile by {answer.measured / answer.planned:.2f}"
            f" ({answer}): measure the profile again, or correct the described machine"
        )
    if not time.is_inside and not warnings:
        warnings.append(f"WARNING: {time}: the plan does not hold for this run")
    return PlanVerdict(figures=(time, emitted, hits, answer), warnings=tuple(warnings))


def units_of_run(folder: Path) -> list[Unit]:
    """Reads the requests of a complete run that decoded one request at a time."""
    if not (folder / "summary.json").is_file():
        raise UserError(
            f"check={folder} has no summary.json: give the folder of a complete `specdec run`, or"
            " check=true to run the first choice here"
        )
    records = read_requests(folder / "requests.jsonl")
    units = [Unit.of([r.result], r.totals) for r in records if r.totals is not None]
    if not units or len(units) < len(records):
        raise UserError(
            f"check={folder} has requests that shared steps: check with a run of batch_size=1"
        )
    return units
