"""The schedule of a pipeline from its trace: SpecPipe's Fig. 12 and Algorithm 1."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from experiments.reproduce.drafts import SIMULATED, Draft, drafts, size_overrides
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab

Event = Mapping[str, Any]
_PASSES = "passes of the last stage, one token each"
_ROUNDING_US = 1e-3  # of the times in a trace


def timeline(item: Item, lab: Lab) -> Findings:
    """One request's timeline, and the phases of the stages' time (SpecPipe Fig. 12).

    Keys: ``common``, ``draft``, claims ``aligned``, ``flush``, ``compute``, ``prune``.
    """
    from specdec.report.traces import timeline_png

    findings, config = Findings(), item.config
    for draft in drafts([config["draft"]], item, lab, findings):
        trace, summary = _traced(config, lab, draft)
        spent: dict[str, float] = {}
        prunes = []
        for event in _events(trace):
            spent[event["cat"]] = spent.get(event["cat"], 0.0) + event["dur"]
            if event["cat"] == "prune":
                prunes.append(event["dur"] / 1e3)
        busy = {kind: us for kind, us in spent.items() if kind != "wait"}
        share = busy.get("compute", 0.0) / sum(busy.values())
        loops = summary["loop_share"]
        flushes = summary["flush_steps"]
        aligned, num_steps = _aligned(_by_step(trace))
        for claim, value, text in (
            ("aligned", aligned == num_steps, f"{aligned} of {num_steps} steps"),
            ("flush", flushes > 0, f"{flushes} flush steps in {summary['steps']}"),
            ("compute", share > 0.5, f"{100 * share:.0f} % of the stages' busy time"),
            ("prune", max(prunes, default=0.0), "pinned by the profile"),
        ):
            conditions = f"{draft.title}, one prompt; {text}"
            findings.add(claim, value, "simulated", conditions, loops=loops)
        rows = tuple((kind, us / 1e3, us / sum(busy.values()), loops) for kind, us in busy.items())
        columns = ("phase", "ms", "share of busy time", "loop_share")
        findings.table("Time of all stages", columns, rows)
        findings.figure = timeline_png(trace, title=f"{item.id}, simulated, {draft.title}")
    return findings


def algorithm(item: Item, lab: Lab) -> Findings:
    """SpecPipe's Algorithm 1 line by line, as a run's trace shows it.

    Keys: ``common``, ``draft``, ``compare`` (overrides of a comparison with plain decoding on real
    models); claims ``output``, ``stages``, ``token``, ``prune``, ``forward``.
    """
    findings, config = Findings(), item.config
    compared = lab.compare([*config["compare"], *size_overrides(item, lab)])
    row = next(r for r in compared["rows"] if r["strategy"] == "specpipe")
    text = f"bundled pair, {row['num_compared']} prompts, {row['num_differing']} differ"
    findings.add("output", bool(row["lossless"]), "measured", text, loops=row["loop_share"])
    rows = []
    for draft in drafts([config["draft"]], item, lab, findings):
        trace, summary = _traced(config, lab, draft)
        facts = _facts(_by_step(trace), summary)
        for claim, (count, of, what) in facts.items():
            where = f"{draft.title}, one prompt; {count} of {of} {what}"
            loops = summary["loop_share"]
            findings.add(claim, count == of > 0, "simulated", where, loops=loops)
            rows.append((item.stated.claims[claim].text, count, of, what, loops))
    columns = ("line", "held", "of", "counted", "loop_share")
    findings.table("Algorithm 1 in a trace", columns, rows)
    return findings


def _facts(
    steps: Mapping[int, Sequence[Event]], summary: Mapping[str, Any]
) -> dict[str, tuple[int, int, str]]:
    """(number of cases in which it holds, number of cases, counted cases) of each claim."""
    work = {step: _rows(events, "compute") for step, events in steps.items()}
    pruned = {step: _rows(events, "prune") for step, events in steps.items()}
    last = max(max(rows, default=0) for rows in work.values())
    answered = [step for step, rows in work.items() if last in rows]
    all_prune = [step for step, ranks in pruned.items() if len(ranks) == last]
    some_prune = [step for step, ranks in pruned.items() if ranks]
    moves = [
        (rows[rank], work[step + 1][rank + 1])
        for step, rows in work.items()
        for rank in rows
        if step in pruned and pruned[step] and rank + 1 in work.get(step + 1, {})
    ]
    shrunk = sum(after <= before for before, after in moves)
    return {
        "stages": (*_aligned(steps), "steps in which all stages work at the same time"),
        "token": (*sorted((len(answered), summary["answers"])), _PASSES),
        "prune": (len(all_prune), len(some_prune), "prunings by every stage at once"),
        "forward": (shrunk, len(moves), "levels that moved on after a pruning, none larger"),
    }


def _traced(
    config: Mapping[str, Any], lab: Lab, draft: Draft
) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = lab.traced([*draft.overrides, "data.limit=1", SIMULATED, *config["common"]])
    names = ("trace.json", "summary.json")
    trace, summary = (json.loads((folder / n).read_text(encoding="utf-8")) for n in names)
    return trace, summary


def _events(trace: Mapping[str, Any]) -> list[Event]:
    """The events of the stages, without the draft."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in events if event["tid"] > 0]


def _by_step(trace: Mapping[str, Any]) -> dict[int, list[Event]]:
    """Events of the stages by step, without prefill."""
    by_step: dict[int, list[Event]] = {}
    for event in _events(trace):
        if event["cat"] != "wait" and not event["args"].get("prefill"):
            by_step.setdefault(event["args"]["step"], []).append(event)
    return dict(sorted(by_step.items()))


def _rows(events: Sequence[Event], kind: str) -> dict[int, int]:
    return {e["tid"]: e["args"].get("tokens", 0) for e in events if e["cat"] == kind}


def _aligned(steps: Mapping[int, Sequence[Event]]) -> tuple[int, int]:
    """Number of steps that begin after the previous step has ended on every stage, and of all."""
    spans = [
        (min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events))
        for events in steps.values()
    ]
    aligned = sum(start >= end - _ROUNDING_US for (_, end), (start, _) in pairwise(spans))
    return aligned, len(spans) - 1
