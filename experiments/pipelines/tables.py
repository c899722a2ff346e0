"""Time between tokens of pipelined methods at the papers' scale (SpecPipe Fig. 11, PipeDec Fig. 5).

Every row decodes the same prompts with the same hits on the same stages; only the strategy differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.pipelines.theory import steps_by_equation_2
from experiments.reproduce.arithmetic import computed
from experiments.reproduce.drafts import Draft, drafts
from experiments.reproduce.drawing import (
    bars,
    below,
    claims_panel,
    figure,
    legend,
    line_chart,
    tidy,
)
from experiments.reproduce.findings import Findings, Measure, Table
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio

SIMULATED = "clock=simulated"
COLUMNS = (
    *("draft", "row", "TBT ms", "of PP", "steps/token", "hit rate", "accept length"),
    *("nodes/pass", "draft passes/token", "loop_share", "prompts", "tokens"),
)


def tbt(item: Item, lab: Lab) -> Findings:
    """TBT of the config's ``rows`` for each of its ``drafts``, and the stated ratios.

    Keys: ``common`` (overrides of all rows), ``rows`` (name -> overrides, the first is plain
    decoding), ``ratios`` (claim -> [slow, fast]), ``values`` (claim -> row), ``chains`` (row ->
    drafts and overrides: methods that an acceptance trace drives, on prompts of their own),
    ``chain_ratios`` (claim -> [slow, fast], the slow one a chain; on the drafts of
    ``chain_against``), ``values_of`` (drafts that ``values`` are given for), ``paper`` (row -> the
    paper's milliseconds, for the picture), ``paced`` (run with ``--paced``).
    """
    found, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    shown: dict[str, dict[str, float | None]] = {}
    if config.get("paper"):
        shown["paper"] = dict(config["paper"])
    chains = _chains(item, lab, found, table)
    for draft in drafts(config["drafts"], item, lab, found):
        runs = run_rows(lab, draft, config["common"], config["rows"])
        table += [
            row_of(draft, name, run, plain=next(iter(runs.values()))) for name, run in runs.items()
        ]
        shown[draft.name.replace("_", "\n")] = {name: run.tbt_ms for name, run in runs.items()}
        found.measures += _ratios(config, draft, runs)
        found.measures += _chain_ratios(config, draft, runs, chains)
    for name, runs in chains.items():
        for draft, run in runs:
            shown.setdefault("traced\nchains", {})[f"{name}, {draft.name}"] = run.tbt_ms
    found.tables.append(Table("Simulated time between tokens", COLUMNS, tuple(table)))
    found.measures += computed(config)
    if lab.paced and "paced" in config:
        _paced(config["paced"], lab, found)
    found.figure = _tbt_figure(item, found, shown)
    found.missing += list(config.get("absent", ()))
    found.notes += list(config.get("notes", ()))
    return found


def _paced(config: Mapping[str, Any], lab: Lab, found: Findings) -> None:
    """Real processes held to the profile. Keys: ``words``, ``ratios`` (claim -> strategy)."""
    compared = lab.compare(config["words"])
    rows = {row["strategy"]: row for row in compared["rows"]}
    table = tuple(
        (
            *(name, row["tbt_ms_mean"], row["speedup_wall"], row["speedup_wall_interval"]),
            *(row["overrun_share"], row["hit_rate"], row["lossless"], row["loop_share"]),
        )
        for name, row in rows.items()
    )
    columns = (
        *("row", "TBT ms", "over ar", "95 % interval", "overrun_share", "hit rate"),
        *("tokens as ar", "loop_share"),
    )
    found.tables.append(Table("Paced: a process per stage, real messages", columns, table))
    for claim, name in config["ratios"].items():
        row = rows[name]
        if not (row["paced_counts"] and rows["ar"]["paced_counts"]):
            share = f"{100 * row['overrun_share']:.1f} %"
            found.missing.append(f"paced {name}: {share} of its work overran its profile")
            continue
        interval = row["speedup_wall_interval"] or (None, None)
        text = f"bundled pair, {config['on']}"
        loops, value = row["loop_share"], row["speedup_wall"]
        found.add(claim, value, "paced", text, loops=loops, interval=interval)


def run_rows(
    lab: Lab, draft: Draft, common: Sequence[str], rows: Mapping[str, Sequence[str]]
) -> dict[str, Outcome]:
    """Every row on one draft; a later override wins."""
    return {
        name: lab.run([*draft.words, SIMULATED, *common, *words]) for name, words in rows.items()
    }


def row_of(draft: Draft, name: str, run: Outcome, *, plain: Outcome) -> tuple[Any, ...]:
    """One line of a table with ``COLUMNS``."""
    s = run.summary
    return (
        *(draft.title, name, run.tbt_ms, plain.tbt_ms / run.tbt_ms, s["steps_per_token"]),
        *(s["hit_rate"], s["acceptance_length"], s["rows_per_target_pass"]),
        *(s["draft_passes_per_token"], s["loop_share"], s["num_prompts"], s["new_tokens"]),
    )


def ratio_measure(claim: str, draft: Draft, *, slow: Outcome, fast: Outcome) -> Measure:
    """How many times faster one row is than another, with its interval over prompts."""
    value, low, high = speed_ratio(fast, slow)
    return Measure(
        claim=claim,
        value=value,
        kind="simulated",
        conditions=draft.title,
        low=low,
        high=high,
        loop_share=fast.summary["loop_share"],
    )


def _ratios(config: Mapping[str, Any], draft: Draft, runs: Mapping[str, Outcome]) -> list[Measure]:
    measures = [
        ratio_measure(claim, draft, slow=runs[slow], fast=runs[fast])
        for claim, (slow, fast) in config.get("ratios", {}).items()
    ]
    values = config.get("values", {})
    for claim, name in (
        values.items() if draft.name in config.get("values_of", [draft.name]) else ()
    ):
        run = runs[name]
        measures.append(
            Measure(
                claim=claim,
                value=run.tbt_ms,
                kind="simulated",
                conditions=draft.title,
                loop_share=run.summary["loop_share"],
            )
        )
    return measures


def _chains(
    item: Item, lab: Lab, found: Findings, table: list[tuple[Any, ...]]
) -> dict[str, list[tuple[Draft, Outcome]]]:
    """Rows that traces drive, each against plain decoding of the same traced prompts."""
    made: dict[str, list[tuple[Draft, Outcome]]] = {}
    plain_words = next(iter(item.config["rows"].values()))
    for name, chain in item.config.get("chains", {}).items():
        for draft in drafts(chain["drafts"], item, lab, found):
            rows = {"PP": plain_words, name: chain["words"]}
            runs = run_rows(lab, draft, item.config["common"], rows)
            table.append(row_of(draft, name, runs[name], plain=runs["PP"]))
            made.setdefault(name, []).append((draft, runs[name]))
            for claim in chain.get("over_plain", ()):
                found.measures.append(ratio_measure(claim, draft, slow=runs["PP"], fast=runs[name]))
    return made


def _chain_ratios(
    config: Mapping[str, Any],
    draft: Draft,
    runs: Mapping[str, Outcome],
    chains: Mapping[str, Sequence[tuple[Draft, Outcome]]],
) -> list[Measure]:
    """Rows of other prompts and another model: no interval, and the conditions say so."""
    measures: list[Measure] = []
    if draft.name not in config.get("chain_against", [draft.name]):
        return measures
    for claim, (slow, fast) in config.get("chain_ratios", {}).items():
        for traced, run in chains.get(slow, ()):
            measures.append(
                Measure(
                    claim=claim,
                    value=run.tbt_ms / runs[fast].tbt_ms,
                    kind="simulated",
                    conditions=f"{draft.title}; other side: {traced.title} (other prompts)",
                    loop_share=runs[fast].summary["loop_share"],
                )
            )
    return measures


def _tbt_figure(
    item: Item, found: Findings, shown: Mapping[str, Mapping[str, float | None]]
) -> Any:
    made, (left, right) = figure(13.5, 6.0, 2)
    bars(left, shown, form="{:.0f}")
    tidy(
        left, x="draft", y="time between tokens (ms)", title="simulated; the paper's where it says"
    )
    below(left, 3)
    same = [m for m in found.measures if "other side" not in m.conditions]
    claims_panel(right, item.stated.claims, same or found.measures, unit="x")
    made.suptitle(f"{item.id}: {item.stated.title}", fontsize=10, x=0.01, ha="left")
    return made


def sampling_change(item: Item, lab: Lab) -> Findings:
    """What sampling costs: TBT at 0.6/0.9/80 against greedy, each over its own tokens.

    Keys: ``common``, ``rows``, ``greedy``, ``stochastic`` (drafts), ``changes`` (claim -> row),
    ``sentences`` (claim -> row whose increase must be below ``small`` per cent).
    """
    found, config = Findings(), item.config
    pair = list(drafts([config["greedy"], config["stochastic"]], item, lab, found))
    if len(pair) < 2:
        return found
    runs = [run_rows(lab, draft, config["common"], config["rows"]) for draft in pair]
    table = [
        row_of(draft, name, run, plain=next(iter(rows.values())))
        for draft, rows in zip(pair, runs, strict=True)
        for name, run in rows.items()
    ]
    found.tables.append(Table("Greedy and stochastic decoding", COLUMNS, tuple(table)))
    conditions = f"{pair[0].title} against {config['stochastic']}"
    for claim, name in {**config.get("changes", {}), **config.get("sentences", {})}.items():
        greedy, sampled = (rows[name] for rows in runs)
        change = 100.0 * (sampled.tbt_ms / greedy.tbt_ms - 1.0)
        is_sentence = claim in config.get("sentences", {})
        loops = sampled.summary["loop_share"]
        found.add(
            claim,
            change < config["small"] if is_sentence else change,
            "simulated",
            f"{conditions}; change {change:+.1f} %" if is_sentence else conditions,
            loops=loops,
        )
    made, (ax,) = figure(7.0, 3.8)
    shown = {
        d.name.replace("_", " "): {n: r.tbt_ms for n, r in rows.items()}
        for d, rows in zip(pair, runs, strict=True)
    }
    bars(ax, shown)
    tidy(ax, x="sampling", y="time between tokens (ms, simulated)", title=item.stated.title)
    legend(ax, loc="best")
    found.figure = made
    found.notes += list(config.get("notes", ()))
    return found


def levels(item: Item, lab: Lab) -> Findings:
    """Several tree levels per step (SpecPipe 3.4): same rows per step, and the same width.

    Keys: ``common``, ``drafts``, ``rows``; ``worse`` (claim: every later row is slower than the
    first).
    """
    found, config = Findings(), item.config
    table, shown = [], {}
    for draft in drafts(config["drafts"], item, lab, found):
        runs = run_rows(lab, draft, config["common"], config["rows"])
        names = list(runs)
        table += [row_of(draft, name, runs[name], plain=runs[names[0]]) for name in names]
        shown[draft.name.replace("_", "\n")] = {name: runs[name].tbt_ms for name in names}
        one, *more = (runs[name].tbt_ms for name in names)
        found.add(
            config["worse"],
            all(ms > one for ms in more),
            "simulated",
            (f"{draft.title}; {', '.join(f'{ms / one:.2f}' for ms in more)} of one level's time"),
            loops=runs[names[0]].summary["loop_share"],
        )
    columns = tuple("of one level" if c == "of PP" else c for c in COLUMNS)
    found.tables.append(Table("Levels per step", columns, tuple(table)))
    made, (ax,) = figure(8.0, 4.0)
    bars(ax, shown)
    tidy(ax, x="draft", y="time between tokens (ms, simulated)", title=item.stated.title)
    legend(ax)
    found.figure = made
    return found


def equations(item: Item, lab: Lab) -> Findings:
    """Eq. 2's steps per token at the simulated hit rate, beside the simulated steps.

    Keys: ``common``, ``drafts``, ``stages``, ``row``, ``claim`` (the worst error in per cent).
    """
    found, config = Findings(), item.config
    table = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for draft in drafts(config["drafts"], item, lab, found):
        for stages in config["stages"]:
            words = [*config["row"], f"executor.stages={stages}"]
            run = lab.run([*draft.words, SIMULATED, *config["common"], *words])
            hit, steps = run.summary["hit_rate"], run.summary["steps_per_token"]
            law = steps_by_equation_2(hit, stages)
            counts = run.summary
            refills = counts["refill_steps"] / counts["new_tokens"]
            flushes = counts["flush_steps"] / counts["new_tokens"]
            error = 100.0 * (law / steps - 1.0)
            table.append(
                (
                    draft.title,
                    stages,
                    hit,
                    steps,
                    law,
                    error,
                    flushes,
                    refills,
                    counts["loop_share"],
                )
            )
            xs, ys = series.setdefault(draft.name.replace("_", " "), ([], []))
            xs.append(float(stages))
            ys.append(error)
        found.add(
            config["claim"],
            any(abs(row[5]) > 5.0 for row in table if row[0] == draft.title),
            "simulated",
            draft.title,
            loops=counts["loop_share"],
        )
    columns = (
        *("draft", "stages", "hit rate", "steps/token", "Eq. 2", "Eq. 2 off, %"),
        *("flush steps/token", "refill steps/token", "loop_share"),
    )
    found.tables.append(Table("Eq. 2 (reconstructed) against the simulator", columns, tuple(table)))
    y = "Eq. 2 against the simulator (per cent)"
    found.figure = line_chart(series, x="stages", y=y, title="steps per token")
    return found
