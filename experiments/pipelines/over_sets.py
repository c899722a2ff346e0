"""Time between tokens set by set (SpecPipe Fig. 11, PipeDec Fig. 5): one pair, the papers' sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean
from typing import Any

from experiments.pipelines.token_times import COLUMNS, add_ratios, row_of, run_rows
from experiments.reproduce.drafts import Draft, drafts
from experiments.reproduce.drawing import bar_chart
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio

Runs = Mapping[Draft, Mapping[str, Outcome]]


def by_set(item: Item, lab: Lab) -> Findings:
    """Rows on every set.

    Keys: ``common``, ``rows`` (name -> overrides, the first is plain decoding), ``drafts`` (one
    per set), ``ratios`` and ``also`` (as in ``tbt``, a figure per set), ``mean_ratios`` (claim ->
    [slow, fast], the mean over sets), ``highest`` (claim -> [slow, fast, draft whose ratio should
    be the highest]).
    """
    findings, config = Findings(), item.config
    runs = {
        draft: run_rows(lab, draft, config["common"], config["rows"])
        for draft in drafts(config["drafts"], item, lab, findings)
    }
    for draft, rows in runs.items():
        add_ratios(findings, config, draft, rows)
    if runs:
        for claim, (slow, fast) in config.get("mean_ratios", {}).items():
            _add_mean(findings, claim, runs, slow, fast)
        for claim, (slow, fast, best) in config.get("highest", {}).items():
            _add_highest(findings, claim, runs, slow, fast, best)
    table = [
        row_of(draft, name, run, plain=next(iter(rows.values())))
        for draft, rows in runs.items()
        for name, run in rows.items()
    ]
    findings.table("Simulated time between tokens", COLUMNS, table)
    y, title = "time between tokens (ms, simulated)", item.stated.title
    shown = {d.short: {n: run.tbt_ms for n, run in rows.items()} for d, rows in runs.items()}
    findings.figure = bar_chart(shown, x="set", y=y, title=title, size=(11.0, 4.4), form="{:.0f}")
    return findings


def _add_mean(findings: Findings, claim: str, runs: Runs, slow: str, fast: str) -> None:
    """Adds the mean of the sets' ratios; sets are independent, so their intervals add in squares.

    The interval is about prompts of these sets, not about other sets.
    """
    ratios = [speed_ratio(rows[fast], rows[slow]) for rows in runs.values()]
    mean = fmean(value for value, _, _ in ratios)
    below, above = (_combined([(ratio[0], ratio[end]) for ratio in ratios]) for end in (1, 2))
    low = None if below is None else mean - below
    high = None if above is None else mean + above
    first = next(iter(runs))
    text = f"mean of {len(runs)} sets, as {first.title}"
    loops = _mean_loops(runs)
    findings.add(claim, mean, "simulated", text, interval=(low, high), kind=first.kind, loops=loops)


def _combined(ends: Sequence[tuple[float, float | None]]) -> float | None:
    """Distance of one end of the mean's interval; None if a set has no interval."""
    if any(end is None for _, end in ends):
        return None
    return sqrt(sum((end - value) ** 2 for value, end in ends if end is not None)) / len(ends)


def _add_highest(
    findings: Findings, claim: str, runs: Runs, slow: str, fast: str, best: str
) -> None:
    ratios: dict[str, Any] = {d.name: speed_ratio(r[fast], r[slow])[0] for d, r in runs.items()}
    top = max(ratios, key=lambda name: ratios[name])
    titles = {draft.name: draft.short for draft in runs}
    text = ", ".join(f"{titles[n]} {r:.2f}x" for n, r in ratios.items())
    kind = next(iter(runs)).kind
    findings.add(claim, top == best, "simulated", text, kind=kind, loops=_mean_loops(runs))


def _mean_loops(runs: Runs) -> float | None:
    shares = [next(iter(rows.values())).summary["loop_share"] for rows in runs.values()]
    return None if None in shares else fmean(shares)
