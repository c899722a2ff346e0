"""Greedy against stochastic decoding (SpecPipe Fig. 15, PipeDec Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.pipelines.token_times import COLUMNS, row_of, run_rows
from experiments.reproduce.drafts import Draft, drafts
from experiments.reproduce.drawing import bars, claims_panel, figure, legend, tidy
from experiments.reproduce.findings import Findings, below
from experiments.reproduce.intervals import Interval, hits_of, interval, times_of
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome

Runs = Mapping[str, Outcome]


def sampling_change(item: Item, lab: Lab) -> Findings:
    """The change by sampling: stochastic repeats against greedy, each over its own tokens.

    Keys: ``common``, ``rows``, ``greedy`` (drafts), ``stochastic`` (drafts, one per repeat),
    ``changes`` (claim -> row whose TBT changes by so many per cent), ``sentences`` (claim -> row
    whose increase must be below ``small`` per cent), ``accuracy`` (claim -> row whose hit rate must
    fall by less than ``points``), ``stabler`` (claim -> [row, other]: the row's increase is less).
    """
    findings, config = Findings(), item.config
    names = [*config["greedy"], *config["stochastic"]]
    runs = {
        draft: run_rows(lab, draft, config["common"], config["rows"])
        for draft in drafts(names, item, lab, findings)
    }
    table = [
        row_of(draft, name, run, plain=next(iter(rows.values())))
        for draft, rows in runs.items()
        for name, run in rows.items()
    ]
    findings.table("Greedy and stochastic decoding", COLUMNS, table)
    sampled = [rows for draft, rows in runs.items() if draft.name in config["stochastic"]]
    for draft, rows in runs.items():
        if draft.name in config["greedy"] and sampled:
            _add_changes(findings, config, draft, rows, sampled)
    fig, (left, *more) = figure(*((11.5, 4.4, 2) if config.get("changes") else (7.0, 4.2, 1)))
    shown = {d.short: {n: r.tbt_ms for n, r in rows.items()} for d, rows in runs.items()}
    bars(left, shown)
    tidy(left, x="sampling", y="time between tokens (ms, simulated)", title=item.stated.title)
    legend(left)
    for ax in more:
        claims_panel(ax, item.stated.claims, findings.measures)
    findings.figure = fig
    return findings


def _add_changes(
    findings: Findings,
    config: Mapping[str, Any],
    draft: Draft,
    plain: Runs,
    sampled: Sequence[Runs],
) -> None:
    """Adds the figures and sentences against one greedy draft."""
    text = f"bundled pair, replayed: 0.6/0.9/80, {len(sampled)} repeats, against {draft.short}"
    loops = fmean(float(next(iter(rows.values())).summary["loop_share"]) for rows in sampled)
    change = {name: _tbt_change(plain[name], [rows[name] for rows in sampled]) for name in plain}
    for claim, name in config.get("changes", {}).items():
        value, ends, span = change[name]
        findings.add(claim, value, "simulated", f"{text}; {span}", loops=loops, interval=ends)
    facts: list[tuple[str, bool | None, str]] = []
    for claim, name in config.get("sentences", {}).items():
        value, ends, span = change[name]
        facts.append((claim, below(ends, config["small"]), f"change {value:+.1f} %, {span}"))
    for claim, name in config.get("accuracy", {}).items():
        fall, ends = _accuracy_fall(plain[name], [rows[name] for rows in sampled])
        facts.append((claim, below(ends, config["points"]), f"{fall:.1f} points less"))
    for claim, (name, other) in config.get("stabler", {}).items():
        ours, theirs = change[name][0], change[other][0]
        facts.append((claim, ours < theirs, f"{name} {ours:+.1f} %, {other} {theirs:+.1f} %"))
    for claim, holds, fact in facts:
        findings.add(claim, holds, "simulated", f"{text}; {fact}", loops=loops)


def _tbt_change(plain: Outcome, repeats: Sequence[Outcome]) -> tuple[float, Interval, str]:
    """Change of the time between tokens in per cent, its interval, and its span over repeats."""
    each = [100.0 * (run.tbt_ms / plain.tbt_ms - 1.0) for run in repeats]
    rows = _pooled(plain, repeats, times_of)
    ends = interval(rows, lambda s: 100.0 * (s[2] / s[3] / (s[0] / s[1]) - 1.0))
    sums = [sum(column) for column in zip(*rows, strict=True)]
    value = 100.0 * (sums[2] / sums[3] / (sums[0] / sums[1]) - 1.0)
    return value, ends, f"single repeats {min(each):+.1f} to {max(each):+.1f} %"


def _accuracy_fall(plain: Outcome, repeats: Sequence[Outcome]) -> tuple[float, Interval]:
    """Percentage points of the hit rate that sampling costs, with their interval."""
    rows = _pooled(plain, repeats, hits_of)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    value = 100.0 * (sums[0] / sums[1] - sums[2] / sums[3])
    return value, interval(rows, lambda s: 100.0 * (s[0] / s[1] - s[2] / s[3]))


def _pooled(plain: Outcome, repeats: Sequence[Outcome], counts: Any) -> list[tuple[float, ...]]:
    """Two counts of the greedy run and two of all repeats, per common prompt: float[P, 4]."""
    greedy = {r.id: c for r, c in zip(plain.results, counts(plain.results), strict=True)}
    sums: dict[int, tuple[float, float]] = {}
    for run in repeats:
        for result, (first, second) in zip(run.results, counts(run.results), strict=True):
            before = sums.get(result.id, (0.0, 0.0))
            sums[result.id] = (before[0] + first, before[1] + second)
    return [(*greedy[i], *sums[i]) for i in sorted(greedy.keys() & sums.keys())]
