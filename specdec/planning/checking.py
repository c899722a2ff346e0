"""A plan beside a real run of its first choice: which input was wrong, if one was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.files import parse_json
from specdec.planning.search import drawn_units, effective, interval
from specdec.planning.simulate import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the run beside the plan's.

    Attributes:
        name: of the figure.
        planned: the plan's; ``low`` and ``high`` the 95 % interval of such a run.
        measured: the run's.
    """

    name: str
    planned: float
    low: float
    high: float
    measured: float

    @property
    def is_inside(self) -> bool:
        """Whether the run's is inside the interval."""
        return self.low <= self.measured <= self.high

    def told(self) -> str:
        """In one line."""
        where = "inside" if self.is_inside else "OUTSIDE"
        return (
            f"{self.name}: planned {self.planned:.3f} ({self.low:.3f} to {self.high:.3f}), run"
            f" {self.measured:.3f}, {where}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check.

    Attributes:
        figures: time per token, acceptance, and time per answer.
        warnings: which input is wrong; empty where the run agrees.
    """

    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether the run is inside the plan's interval."""
        return not self.warnings

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"figures": [asdict(f) for f in self.figures], "warnings": list(self.warnings)}


def expectation(
    units: list[Unit], *, requests: int, drawn: bool, error: float, whole: bool
) -> dict[str, Any]:
    """What ``check_run`` needs of a plan, as plain values.

    Args:
        units: of the first choice.
        requests, drawn: see ``specdec.planning.search.effective``.
        error: relative error of the machine's times.
        whole: whether answers are of whole trees, so that they emit several tokens.
    """
    return {
        "units": [asdict(unit) for unit in units],
        "requests": requests,
        "drawn": drawn,
        "error": error,
        "whole": whole,
    }


def check_run(expected: Mapping[str, Any], summary: Mapping[str, Any]) -> Verdict:
    """Compares a run of the first choice with the plan, at batch size 1.

    The interval is that of as many prompts as the run has, drawn anew (bootstrap over the plan's
    prompts, the law's own uncertainty included), and for times the error of the machine's times
    besides. Acceptance outside of it blames the law or record, a time per answer the profile.

    Args:
        expected: of a plan, see ``Plan``.
        summary: summary.json of the run, or a row of comparison.json.

    Raises:
        UserError: the run has no figures to compare.
    """
    needed = ("num_prompts", "tbt_ms_mean", "answers", "new_tokens")
    missing = [name for name in needed if not summary.get(name)]
    if missing:
        raise UserError(
            f"the run has no {', '.join(missing)}: give the folder of a complete `specdec run`"
        )
    units = [Unit(**values) for values in expected["units"]]
    carried = effective(len(units), int(expected["requests"]), bool(expected["drawn"]))
    count = 1.0 / (1.0 / carried + 1.0 / int(summary["num_prompts"]))
    names = ("tokens", "seconds", "emitted", "answers", "hits")
    of = {name: np.array([getattr(u, name) for u in units], float) for name in names}
    picks = drawn_units(len(units), count)
    drawn = {name: values[picks].sum(axis=1) for name, values in of.items()}
    whole = {name: values.sum() for name, values in of.items()}
    error = float(expected["error"])

    def figure(name: str, ratio: Any, measured: float, spread: float) -> Figure:
        low, high = interval(ratio(drawn))
        return Figure(
            name=name,
            planned=float(ratio(whole)),
            low=low * (1.0 - spread),
            high=high * (1.0 + spread),
            measured=measured,
        )

    time = figure(
        "ms per token",
        lambda s: 1e3 * s["seconds"] / np.maximum(s["tokens"], 1.0),
        float(summary["tbt_ms_mean"]),
        error,
    )
    if expected["whole"]:
        acceptance = figure(
            "tokens per answer",
            lambda s: s["emitted"] / np.maximum(s["answers"], 1.0),
            summary["new_tokens"] / summary["answers"],
            0.0,
        )
    else:
        acceptance = figure(
            "hit rate",
            lambda s: s["hits"] / np.maximum(s["answers"], 1.0),
            float(summary["hit_rate"]),
            0.0,
        )
    answer = figure(
        "ms per answer",
        lambda s: (
            1e3
            * s["seconds"]
            / np.maximum(s["tokens"], 1.0)
            * s["emitted"]
            / np.maximum(s["answers"], 1.0)
        ),
        float(summary["tbt_ms_mean"]) * summary["new_tokens"] / summary["answers"],
        error,
    )
    return Verdict(
        figures=(time, acceptance, answer),
        warnings=tuple(_warnings(time, acceptance, answer, bool(expected["whole"]))),
    )


def _warnings(time: Figure, acceptance: Figure, answer: Figure, whole: bool) -> list[str]:
    """Which input is wrong.

    A time per answer follows from the profile alone where answers are of whole trees; elsewhere
    it contains refills after misses, so it says nothing of the profile while hits disagree.
    """
    found = []
    if not acceptance.is_inside:
        found.append(
            f"WARNING: acceptance disagrees with the law ({acceptance.told()}): plan again with a"
            " record or log of this workload"
        )
    if not answer.is_inside and (whole or acceptance.is_inside):
        slow = answer.measured / answer.planned
        found.append(
            f"WARNING: times disagree with the profile by {slow:.2f} ({answer.told()}): measure"
            " the profile again, or correct the described machine"
        )
    if not time.is_inside and not found:
        found.append(f"WARNING: {time.told()}: the plan does not hold for this run")
    return found


def summary_of(folder: Path) -> Mapping[str, Any]:
    """The summary of a run folder.

    Raises:
        UserError: no complete run.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise UserError(
            f"check={folder} has no summary.json: give the folder of a complete `specdec run`, or"
            " check=true to run the first choice here"
        )
    loaded = parse_json(path.read_bytes())
    if not isinstance(loaded, dict):
        raise UserError(f"check={folder}: summary.json is damaged")
    return loaded
