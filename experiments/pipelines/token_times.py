"""Time between tokens of pipelined methods at the papers' scale (SpecPipe Fig. 11, PipeDec Fig. 5).

All rows decode the same prompts with the same hits on the same stages with different strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.pipelines.theory import decode_counts
from experiments.reproduce.arithmetic import computed
from experiments.reproduce.drafts import Draft, drafts, short_title
from experiments.reproduce.drawing import (
    bar_chart,
    bars,
    claims_panel,
    figure,
    legend,
    line_chart,
    tidy,
)
from experiments.reproduce.findings import Findings, below, surely, weaker
from experiments.reproduce.intervals import Interval, beside, hits_of, interval, times_of
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio
from experiments.reproduce.pacing import add_paced
from experiments.reproduce.stated import COUNTED
from specdec.clocks import Work
from specdec.clocks.build import build_profile
from specdec.types import FloatArray

COLUMNS = (
    *("draft", "row", "TBT ms", "of PP", "steps/token", "hit rate", "accept length"),
    *("nodes/pass", "draft passes/token", "loop_share", "prompts", "tokens"),
)


def tbt(item: Item, lab: Lab) -> Findings:
    """TBT of the config's ``rows`` for each of its ``drafts``, and the stated ratios.

    Keys: ``common`` (overrides of all rows), ``rows`` (name -> overrides, the first is plain
    decoding), ``ratios`` (claim -> [slow, fast]), ``long`` (the same for long texts, which
    counts too), ``also`` (claim -> pairs over other forms of the baseline than the one fixed, which
    never count), ``values`` (claim -> row), ``chains`` (row ->
    drafts and overrides: methods with hits from an acceptance trace, on other prompts),
    ``chain_ratios`` (claim -> [slow, fast], the slow one a chain; on the drafts of
    ``chain_against``), ``heads`` (row -> ``drafts``, ``words``, rows ``beside`` it and ``ratios``:
    a method that runs a trained head on a real target, with those rows on the same prompts),
    ``values_of`` (drafts of ``values``), ``paper`` (row -> the paper's milliseconds, for the
    picture), ``paced`` (run with ``--paced``).
    """
    findings, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    chains = _chains(item, lab, findings, table)
    for draft in drafts(config["drafts"], item, lab, findings):
        runs = run_rows(lab, draft, config["common"], config["rows"])
        table += [
            row_of(draft, name, run, plain=next(iter(runs.values()))) for name, run in runs.items()
        ]
        add_ratios(findings, config, draft, runs)
        _add_values(findings, config, draft, runs)
        _add_chain_ratios(findings, config, draft, runs, chains)
    _add_heads(item, lab, findings, table)
    findings.table("Simulated time between tokens", COLUMNS, table)
    findings.measures += computed(config)
    if lab.paced and "paced" in config:
        add_paced(config["paced"], lab, findings)
    return findings


def run_rows(
    lab: Lab, draft: Draft, common: Sequence[str], rows: Mapping[str, Sequence[str]]
) -> dict[str, Outcome]:
    return {name: lab.run(draft.words(*common, *overrides)) for name, overrides in rows.items()}


def tbt_interval(run: Outcome) -> Interval:
    """The 95 % interval over prompts of a run's milliseconds between tokens."""
    return interval(times_of(run.results), lambda sums: 1e3 * sums[0] / sums[1])


def row_of(draft: Draft, name: str, run: Outcome, *, plain: Outcome) -> tuple[Any, ...]:
    s = run.summary
    return (
        *(draft.title, name, run.tbt_ms, plain.tbt_ms / run.tbt_ms, s["steps_per_token"]),
        *(s["hit_rate"], s["acceptance_length"], s["rows_per_target_pass"]),
        *(s["draft_passes_per_token"], s["loop_share"], s["num_prompts"], s["new_tokens"]),
    )


def add_ratio(
    findings: Findings,
    claim: str,
    draft: Draft,
    *,
    slow: Outcome,
    fast: Outcome,
    over: str = "",
    text: str = "",
) -> None:
    """Adds a ratio; one that names its baseline in ``over`` is a what-if."""
    value, *ends = speed_ratio(fast, slow)
    kind, text = ("what-if", f"over {over}") if over else ("calibrated", text)
    draft.add(findings, claim, value, text, run=fast, interval=(ends[0], ends[1]), kind=kind)


def add_ratios(
    findings: Findings, config: Mapping[str, Any], draft: Draft, runs: Mapping[str, Outcome]
) -> None:
    """The config's ``ratios`` and ``also``."""
    for claim, (slow, fast) in config.get("ratios", {}).items():
        add_ratio(findings, claim, draft, slow=runs[slow], fast=runs[fast])
    for claim, (slow, fast) in config.get("long", {}).items():
        add_ratio(findings, claim, draft, slow=runs[slow], fast=runs[fast], text="long texts")
    for claim, pairs in config.get("also", {}).items():
        for slow, fast in pairs:
            add_ratio(findings, claim, draft, slow=runs[slow], fast=runs[fast], over=slow)


def _add_values(
    findings: Findings, config: Mapping[str, Any], draft: Draft, runs: Mapping[str, Outcome]
) -> None:
    if draft.name in config.get("values_of", [draft.name]):
        for claim, name in config.get("values", {}).items():
            run = runs[name]
            draft.add(findings, claim, run.tbt_ms, run=run, interval=tbt_interval(run))


def _chains(
    item: Item, lab: Lab, findings: Findings, table: list[tuple[Any, ...]]
) -> dict[str, list[tuple[Draft, Outcome]]]:
    """Rows with hits from traces, each against plain decoding of the same traced prompts."""
    chains: dict[str, list[tuple[Draft, Outcome]]] = {}
    plain_words = next(iter(item.config["rows"].values()))
    for name, chain in item.config.get("chains", {}).items():
        for draft in drafts(chain["drafts"], item, lab, findings):
            rows = {"PP": plain_words, name: chain["words"]}
            runs = run_rows(lab, draft, item.config["common"], rows)
            table.append(row_of(draft, name, runs[name], plain=runs["PP"]))
            chains.setdefault(name, []).append((draft, runs[name]))
            for claim in chain.get("over_plain", ()):
                add_ratio(findings, claim, draft, slow=runs["PP"], fast=runs[name])
    return chains


def _add_heads(item: Item, lab: Lab, findings: Findings, table: list[tuple[Any, ...]]) -> None:
    """Rows with a trained head, each beside rows of ``rows`` that decode the same tokens."""
    for name, head in item.config.get("heads", {}).items():
        rows = {row: item.config["rows"][row] for row in head["beside"]} | {name: head["words"]}
        for draft in drafts(head["drafts"], item, lab, findings):
            runs = run_rows(lab, draft, item.config["common"], rows)
            plain = next(iter(runs.values()))
            table += [row_of(draft, row, run, plain=plain) for row, run in runs.items()]
            for claim, (slow, fast) in head.get("ratios", {}).items():
                add_ratio(findings, claim, draft, slow=runs[slow], fast=runs[fast])


def _add_chain_ratios(
    findings: Findings,
    config: Mapping[str, Any],
    draft: Draft,
    runs: Mapping[str, Outcome],
    chains: Mapping[str, Sequence[tuple[Draft, Outcome]]],
) -> None:
    """Ratios over rows of other prompts and another model, without interval."""
    if draft.name not in config.get("chain_against", [draft.name]):
        return
    for claim, (slow, fast) in config.get("chain_ratios", {}).items():
        for traced, run in chains.get(slow, ()):
            if traced.swapped != draft.swapped:  # another end of the band
                continue
            where = f"{draft.title}; other side: {traced.title} (other prompts)"
            loops = runs[fast].summary["loop_share"]
            ratio = run.tbt_ms / runs[fast].tbt_ms
            kind = weaker(traced.kind, draft.kind)
            findings.add(claim, ratio, "simulated", where, kind=kind, loops=loops)


def tbt_picture(item: Item, findings: Findings) -> Any:
    """The picture of ``tbt``'s findings: times per draft, the paper's first, and the ratios.

    Where some figures count, the others are in the tables only.
    """
    config = item.config
    shown: dict[str, dict[str, float | None]] = {}
    if config.get("paper"):
        shown["paper"] = dict(config["paper"])
    same = [m for m in findings.measures if "other side" not in m.conditions]
    counted = [m for m in same if m.kind in COUNTED]
    # Chains decode other prompts: they come last.
    rows = sorted(findings.tables[0].rows, key=lambda row: row[1] in config.get("chains", {}))
    counts = [row for row in rows if any(m.conditions.startswith(row[0]) for m in counted)]
    rows = counts or rows
    for title, name, ms, *_ in rows:
        shown.setdefault(short_title(title), {})[name] = ms
    measures = counted or same or findings.measures
    # The letters of a claim are below each other: each needs its height.
    fig, (left, right) = figure(13.5, 4.4 + 0.12 * len(measures), 2)
    times = [ms for group in shown.values() for ms in group.values() if ms is not None]
    bars(left, shown, form="{:.0f}" if max(times, default=0.0) > 50 else "{:.1f}")
    title = "simulated" + ("; group 'paper': stated" if "paper" in shown else "")
    tidy(left, x="draft", y="time between tokens (ms)", title=title)
    legend(left)
    claims_panel(right, item.stated.claims, measures, unit="x")
    fig.suptitle(f"{item.id}: {item.stated.title}", fontsize=10, x=0.01, ha="left")
    return fig


def levels(item: Item, lab: Lab) -> Findings:
    """Several tree levels per step (SpecPipe 3.4): same rows per step, and the same width.

    Keys: ``common``, ``drafts``, ``rows``; claims ``worse`` (every later row is slower than the
    first) and ``hits`` (has a lower hit rate).
    """
    findings, config = Findings(), item.config
    table, shown = [], {}
    for draft in drafts(config["drafts"], item, lab, findings):
        runs = run_rows(lab, draft, config["common"], config["rows"])
        names = list(runs)
        table += [row_of(draft, name, runs[name], plain=runs[names[0]]) for name in names]
        shown[draft.short] = {name: runs[name].tbt_ms for name in names}
        one, *more = runs.values()
        slower = [surely(*speed_ratio(one, run)[1:]) for run in more]
        times = ", ".join(f"{run.tbt_ms / one.tbt_ms:.2f}" for run in more)
        worse = False if False in slower else None if None in slower else True
        draft.add(findings, config["worse"], worse, f"{times} of one level's time", run=one)
        ratios = [interval(beside(r.results, one.results, hits_of), _hits_over) for r in more]
        fewer = [below(ends, 1.0) for ends in ratios]
        lower = False if False in fewer else None if None in fewer else True
        rates = ", ".join(f"{run.summary['hit_rate']:.3f}" for run in runs.values())
        draft.add(findings, config["hits"], lower, f"hit rates {rates}", run=one)
    columns = tuple("of one level" if c == "of PP" else c for c in COLUMNS)
    findings.table("Levels per step", columns, table)
    y = "time between tokens (ms, simulated)"
    findings.figure = bar_chart(shown, x="draft", y=y, title=item.stated.title, size=(8.0, 4.0))
    return findings


def _hits_over(sums: FloatArray) -> FloatArray:
    """The hit rate of one run over another's, from their summed hits and answers."""
    return np.asarray(sums[0] / sums[1] / (sums[2] / sums[3]))


def equations(item: Item, lab: Lab) -> Findings:
    """Eq. 1 and 2 at the simulated hit rate p, beside the simulated times and steps.

    Both are reconstructed, since the available text has no formulas: Eq. 1 is max_i T_i + (1 - p)
    times the sum over the other stages, Eq. 2, for equal stages, T (1 + (1 - p) (N - 1)).
    Keys: ``common``, ``drafts``, ``stages``, ``width``, ``row``; claims ``eq1`` and ``eq2`` (the
    equation is within 5 per cent at every number of stages).
    """
    findings, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        rows = [_equations_row(config, lab, draft, stages) for stages in config["stages"]]
        table += rows
        loops = rows[0][-1]
        for claim, column in (("eq1", 6), ("eq2", 9)):
            worst = max((row[column] for row in rows), key=abs)
            text = f"{draft.title}; {worst:+.1f} % off at most"
            findings.add(claim, abs(worst) <= 5.0, "simulated", text, kind=draft.kind, loops=loops)
        for name, column in (("Eq. 1", 6), ("Eq. 2", 9)):
            xs = [float(row[1]) for row in rows]
            series[f"{name}, {draft.short}"] = (xs, [row[column] for row in rows])
    columns = (
        *("draft", "stages", "hit rate", "prompts", "TBT ms", "Eq. 1 ms", "Eq. 1 off, %"),
        *("steps/token", "Eq. 2", "Eq. 2 off, %", "flush steps/token", "refill steps/token"),
        "loop_share",
    )
    findings.table("The equations (reconstructed) and the simulator", columns, table)
    y = "the equation against the simulator (per cent)"
    met = (-5.0, 5.0, "met: within 5 %")
    findings.figure = line_chart(series, x="stages", y=y, title=item.stated.title, within=met)
    return findings


def _equations_row(
    config: Mapping[str, Any], lab: Lab, draft: Draft, stages: int
) -> tuple[Any, ...]:
    overrides = [*config["row"], f"executor.stages={stages}"]
    run = lab.run(draft.words(*config["common"], *overrides))
    s, tokens = run.summary, run.summary["new_tokens"]
    counts = decode_counts(run.results, run.totals)  # without the steps that fill the pipeline
    simulated = counts.steps / counts.tokens
    price, width = build_profile(run.config["clock"]).ms, config["width"]
    stage = sum(price(work, width) for work in (Work.STAGE, Work.PRUNE, Work.TRANSFER))
    missed = (1.0 - s["hit_rate"]) * (stages - 1)  # other stages that a token goes through
    ms, steps = stage + price(Work.HEAD, width) + missed * stage, 1.0 + missed
    return (
        *(draft.title, stages, s["hit_rate"], s["num_prompts"]),
        *(run.tbt_ms, ms, 100.0 * (ms / run.tbt_ms - 1.0)),
        *(simulated, steps, 100.0 * (steps / simulated - 1.0)),
        *(s["flush_steps"] / tokens, s["refill_steps"] / tokens, s["loop_share"]),
    )
