"""Figures and the page of ``experiments.plan.regret``.

A result is a case's eight candidates, the plan's first choice first: planned tokens/s, measured
tokens/s, and seconds and tokens of every batch of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.reproduce.rendering import grid
from specdec.planning.candidates import PLAIN

WITHIN = 0.05
"""Wanted regret, in 90 % of cases."""

NEAR = 0.1
"""Wanted error of the planned tokens/s, in 80 % of cases."""

_RESAMPLES = 4000

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The stored result of a case, and what is reported of it: itself, or a further measurement."""


def regrets(result: Mapping[str, Any]) -> list[float]:
    """Of every candidate, as if it were the first."""
    speeds = [c["measured_tokens_per_s"] for c in result["candidates"]]
    return [max(speeds) / speed - 1.0 for speed in speeds]


def regret(result: Mapping[str, Any]) -> float:
    """Time of the first choice over that of the best, less 1."""
    return regrets(result)[0]


def least_regret(result: Mapping[str, Any]) -> float | None:
    """Lower end of the regret's 95 % interval over batches of prompts; None without their times.

    The greatest of the lower ends against each other candidate, at a level divided by their number
    (Bonferroni), because the fastest of them is chosen by the same times.
    """
    if "turns" not in result["candidates"][0]:
        return None
    turns = np.array([c["turns"] for c in result["candidates"]])  # [candidates, turns, 2]
    drawn = np.random.default_rng(0).integers(turns.shape[1], size=(_RESAMPLES, turns.shape[1]))
    seconds, tokens = np.moveaxis(turns[:, drawn].sum(2), -1, 0)  # [candidates, resamples]
    per_token = seconds / tokens
    ratios = per_token[0] / per_token[1:] - 1.0
    return max(0.0, float(np.quantile(ratios, 0.025 / len(ratios), axis=1).max()))


def error(result: Mapping[str, Any]) -> float:
    """Of the planned tokens/s of the first choice, relative to the measured ones."""
    first = result["candidates"][0]
    return float(first["planned_tokens_per_s"] / first["measured_tokens_per_s"] - 1.0)


def gain_error(result: Mapping[str, Any]) -> float:
    """As ``error``, of the gain over plain decoding."""
    first, plain = result["candidates"][0], _plain(result)
    planned = first["planned_tokens_per_s"] / plain["planned_tokens_per_s"]
    measured = first["measured_tokens_per_s"] / plain["measured_tokens_per_s"]
    return float(planned / measured - 1.0)


def _plain(result: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(c for c in result["candidates"] if c["strategy"] == PLAIN)
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float, float]:
    """How two measurements of a case differ: first choice, plain decoding, gain of the first."""

    def change(at: int) -> float:
        speeds = [r["candidates"][at]["measured_tokens_per_s"] for r in (before, after)]
        return float(speeds[1] / speeds[0] - 1.0)

    names = [candidate["strategy"] for candidate in before["candidates"]]
    first, plain = change(0), change(names.index(PLAIN))
    return first, plain, (1.0 + first) / (1.0 + plain) - 1.0


def sample_ratio(samples: Mapping[str, Any]) -> float:
    """Tokens per answer on the prompts of the record over those on the prompts of the run."""
    (tokens, answers), (run_tokens, run_answers) = samples["planned"], samples["run"]
    return float(tokens / answers / (run_tokens / run_answers))


def gain_error_of_speed(before: Mapping[str, Any], samples: Mapping[str, Any]) -> float:
    """``gain_error`` without the difference between the two samples of prompts."""
    return (1.0 + gain_error(before)) / sample_ratio(samples) - 1.0


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _share(holds: Any) -> str:
    return f"{100 * np.mean(holds):.0f} %"


def _case_row(case: Mapping[str, Any], _: Mapping[str, Any]) -> list[str]:
    first, least = case["candidates"][0], least_regret(case)
    sizes = " ".join(f"{k}={v}" for k, v in first["sizes"].items())
    speeds = (f"{first[f'{kind}_tokens_per_s']:.1f}" for kind in ("measured", "planned"))
    errors = (_percent(error(case)), _percent(gain_error(case)), f"{100 * regret(case):.1f} %")
    lower = "-" if least is None else f"{100 * least:.1f} %"
    return [f"{first['strategy']} {sizes}", *speeds, *errors, lower]


def shares(results: Sequence[Mapping[str, Any]]) -> str:
    """The shares of cases within the bars."""
    small = _share([regret(r) <= WITHIN for r in results])
    near, gains = (_share([abs(of(r)) <= NEAR for r in results]) for of in (error, gain_error))
    return (
        f"{len(results)} cases: regret at most 5 % in {small} (wanted 90 %), tokens/s within 10 %"
        f" in {near} (wanted 80 %), gains over plain decoding within 10 % in {gains}"
    )


def _control_row(_: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    speeds = [c["measured_tokens_per_s"] for c in result["candidates"]]
    found = regrets(result)
    each = (f"{100 * value:.1f} %" for value in (np.median(found), max(found)))
    return [f"{min(speeds):.1f} to {max(speeds):.1f}", *each]


def _control_summary(pairs: Sequence[Pair]) -> str:
    found = np.concatenate([regrets(result) for _, result in pairs])
    return (
        f"{len(found)} candidates in groups of eight identical ones: regret at most 5 % in"
        f" {_share(found <= WITHIN)}, 90 % of them below {100 * np.quantile(found, 0.9):.1f} %"
    )


def _again_row(case: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    speeds = [r["candidates"][0]["measured_tokens_per_s"] for r in (case, result)]
    return [*(f"{speed:.1f}" for speed in speeds), *map(_percent, changes(case, result))]


def _again_summary(pairs: Sequence[Pair]) -> str:
    near = np.abs([changes(*pair) for pair in pairs]) <= NEAR
    first, plain, gain = map(_share, near.T)
    return (
        f"{len(pairs)} cases measured twice: the first choice within 10 % of itself in {first},"
        f" plain decoding in {plain}, the gain in {gain}"
    )


def _samples_row(case: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    planned, run = (tokens / answers for tokens, answers in (result["planned"], result["run"]))
    errors = (sample_ratio(result) - 1, gain_error(case), gain_error_of_speed(case, result))
    return [f"{planned:.2f}", f"{run:.2f}", *map(_percent, errors)]


def _samples_summary(pairs: Sequence[Pair]) -> str:
    ratios = [sample_ratio(samples) - 1.0 for _, samples in pairs]
    errors = np.array([gain_error(case) for case, _ in pairs])
    left = np.array([gain_error_of_speed(*pair) for pair in pairs])
    return (
        f"{len(pairs)} cases: the first choice has {_percent(np.mean(ratios))} tokens per answer"
        f" on the plan's prompts ({100 * min(ratios):+.1f} to {_percent(max(ratios))}); the"
        f" planned gain is {_percent(errors.mean())} off on average and within 10 % in"
        f" {_share(np.abs(errors) <= NEAR)}, without that difference {_percent(left.mean())} and"
        f" {_share(np.abs(left) <= NEAR)}"
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of measurement: its part of the page.

    Attributes:
        head, summary: Markdown above the table, and the line under it.
        columns, row: headings after the case's name, and the cells of a ``Pair``.
    """

    head: str
    columns: tuple[str, ...]
    row: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]]
    summary: Callable[[Sequence[Pair]], str]


_COMMAND = "`python -m experiments.plan.regret DIR"
KINDS = {
    "cases": Kind(
        "# The first choice of plans against measured time\n\n"
        f"{_COMMAND} --write`, revision {{}}; {{}}. Eight candidates per case are in regret.json.",
        (
            *("first choice", "tokens/s measured", "planned", "error", "of the gain", "regret"),
            "lower end of its 95 % interval",
        ),
        _case_row,
        lambda pairs: shares([case for case, _ in pairs]),
    ),
    "control": Kind(
        f"## Eight times the same candidate\n\n{_COMMAND} --control`: no plan can choose better"
        " than among these, so their regrets are the noise of machine and measurement.",
        ("slowest and fastest, tokens/s", "median regret", "largest"),
        _control_row,
        _control_summary,
    ),
    "again": Kind(
        f"## The same runs at another time\n\n{_COMMAND} --again`: how far the second measurement"
        " is from the first, on other prompts; a plan that is right has this error.",
        ("first choice, tokens/s", "then", "change", "plain decoding", "gain"),
        _again_row,
        _again_summary,
    ),
    "samples": Kind(
        f"## The two samples of prompts\n\n{_COMMAND} --samples`: tokens per answer of the first"
        " choice on the prompts that the plan decoded and on those of the run; counts, no times.",
        ("plan's prompts", "run's prompts", "difference", "error of the gain", "without it"),
        _samples_row,
        _samples_summary,
    ),
}


def pairs_of(stored: Mapping[str, Any], kind: str) -> dict[str, Pair]:
    """The stored results of a kind by case; a controlled case need not have a plan."""
    found = stored.get(kind, {})
    return {name: (stored["cases"].get(name, {}), result) for name, result in found.items()}


def line(stored: Mapping[str, Any], kind: str, name: str) -> str:
    cells = KINDS[kind].row(*pairs_of(stored, kind)[name])
    return ", ".join(f"{c} {v}" for c, v in zip(KINDS[kind].columns, cells, strict=True))


def page(stored: Mapping[str, Any]) -> str:
    """All kinds of which there are results, as Markdown."""
    made = [result["provenance"] for result in stored["cases"].values()]
    revisions = sorted({str(m.get("git", {}).get("revision", "unknown"))[:7] for m in made})
    machines = [m.get("hardware", {}) for m in made]
    named = sorted({f"{m.get('cpu', '?')}, {m.get('cores', '?')} cores" for m in machines})
    parts = []
    for name, kind in KINDS.items():
        if pairs := pairs_of(stored, name):
            rows = [[case, *kind.row(*pair)] for case, pair in pairs.items()]
            head = kind.head.format(", ".join(revisions), "; ".join(named))
            table = [*grid(("case", *kind.columns), rows), ""]
            parts.append("\n".join([head, "", *table, kind.summary(list(pairs.values()))]))
    return "\n\n".join(parts) + "\n"
