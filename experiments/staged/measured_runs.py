"""Staged speculative decoding (2308.04623): traffic, speed, spread over prompts, tokens by origin.

All runs use real models on this machine; the paper has a 762M target on an RTX 4090. The relative
memory traffic is also given for the run's passes with the paper's model sizes.

Keys of every item: ``samplings`` (label -> overrides), ``repeats``, and for a pair that is not the
bundled one ``pair`` (its name), ``kind`` and ``words`` (overrides of model, data and threads).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reproduce.drafts import size_overrides
from experiments.reproduce.drawing import (
    bars,
    claims_figure,
    claims_panel,
    figure,
    legend,
    styles,
    tidy,
)
from experiments.reproduce.findings import Findings
from experiments.reproduce.intervals import Interval, interval, share
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from specdec.metrics import Run, RunTotals
from specdec.metrics.compare import comparison_row, prompt_speedups
from specdec.report.results import read_requests

STRATEGIES = ("ar", "speculative", "staged")


def data_overrides() -> list[str]:
    """HumanEval if there is a data folder, else function heads of the standard library."""
    return ["data=humaneval" if os.environ.get("SPECDEC_DATA") else "data=stdlib"]


def pair_of(item: Item) -> str:
    return str(item.config.get("pair", f"bundled pair, {data_overrides()[0]}"))


def compared(item: Item, lab: Lab, label: str) -> dict[str, Any]:
    """Plain, speculative and staged decoding of the same prompts, interleaved."""
    own = item.config.get("words") or (*data_overrides(), "threads=1")
    words = (f"strategies=[{','.join(STRATEGIES)}]", *own)
    repeats = f"repeats={item.config.get('repeats', 3)}"
    sampling = item.config["samplings"][label]
    return lab.compare([*words, *size_overrides(item, lab), repeats, *sampling])


def relative_traffic(row: Mapping[str, Any], draft_share: float) -> float:
    """(target_passes + draft_passes B_d / B_t) / tokens, B_d / B_t given."""
    return float((row["target_passes"] + row["draft_passes"] * draft_share) / row["new_tokens"])


def traffic(item: Item, lab: Lab) -> Findings:
    """Table 1: relative memory traffic. Keys: ``paper_share`` (draft over target weights in the
    paper), ``claims`` (label -> strategy -> claim)."""
    findings, config = Findings(), item.config
    table = []
    for label in config["samplings"]:
        result = compared(item, lab, label)
        counts = _totals(result)
        for row in result["rows"]:
            name = row["strategy"]
            scaled = relative_traffic(row, config["paper_share"] if name != "ar" else 0.0)
            own = row["relative_memory_traffic"]
            passes, loops = row["draft_passes"] / row["new_tokens"], row["loop_share"]
            table.append((label, name, own, scaled, row["acceptance_length"], passes, loops))
            claim = config["claims"].get(label, {}).get(name)
            if claim is None:
                continue
            sizes = (
                (own, _draft_share(counts[name]), "own"),
                (scaled, config["paper_share"], "the paper's"),
            )
            for value, share_of, text in sizes:
                where = f"counts of the {pair_of(item)}; {text} sizes"
                ends = _traffic_interval(counts[name], share_of)
                findings.add(claim, value, "measured", where, loops=loops, interval=ends)
    columns = (
        *("sampling", "row", "own sizes", "the paper's sizes", "accept length"),
        *("draft passes/token", "loop_share"),
    )
    findings.table("Relative memory traffic (counts of runs, exact)", columns, table)
    findings.figure = claims_figure(item.stated.claims, findings.measures, item.stated.title)
    return findings


Totals = list[tuple[RunTotals, int]]


def _totals(result: Mapping[str, Any]) -> dict[str, Totals]:
    """strategy -> (totals, tokens) of each prompt, its repeats pooled."""
    by: dict[str, dict[int, list[Any]]] = {}
    for record in read_requests(result["folder"] / "requests.jsonl"):
        assert record.totals is not None, "prompts are decoded one at a time"
        by.setdefault(record.strategy, {}).setdefault(record.result.id, []).append(record)
    return {
        name: [
            (RunTotals.merge([r.totals for r in same]), sum(len(r.result.output) for r in same))
            for same in prompts.values()
        ]
        for name, prompts in by.items()
    }


def _draft_share(counts: Totals) -> float:
    totals = counts[0][0]
    return totals.draft_bytes / totals.target_bytes


def _traffic_interval(counts: Totals, draft_share: float) -> Interval:
    rows = [(t.target_passes + t.draft_passes * draft_share, tokens) for t, tokens in counts]
    return interval(rows, share)


def _overhead_interval(counts: Totals) -> Interval:
    """Of overhead_share, in per cent."""
    rows = [(t.wall_s - t.total_model_s - t.wait_s, t.wall_s) for t, _ in counts]
    return interval(rows, lambda sums: 100.0 * sums[0] / sums[1])


def speed(item: Item, lab: Lab) -> Findings:
    """Table 2: tokens per second. Key: ``claims`` (label -> [claim of staged over plain, of staged
    over speculative]); a label without claims is only in the table."""
    findings, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    shown: dict[str, dict[str, float | None]] = {}
    for label in config["samplings"]:
        result = compared(item, lab, label)
        rows = {r["strategy"]: r for r in result["rows"]}
        staged = rows["staged"]
        keys = ("tokens_per_s", "speedup_wall", "speedup_theoretical", "lossless")
        keys = (*keys, "acceptance_length", "relative_memory_traffic")
        keys = (*keys, "overhead_share", "rows_per_target_pass", "loop_share")
        table += [(label, name, *(row[key] for key in keys)) for name, row in rows.items()]
        shown[label] = {name: row["tokens_per_s"] for name, row in rows.items()}
        over_plain, over_single = config["claims"].get(label, (None, None))
        if over_plain is None:
            continue
        runs = _runs(read_requests(result["folder"] / "requests.jsonl"))
        beside = comparison_row("staged", runs["staged"], runs["speculative"])
        for claim, compared_row in ((over_plain, staged), (over_single, beside)):
            findings.add(
                claim,
                compared_row["speedup_wall"],
                "measured",
                f"this CPU, {pair_of(item)}, {label}",
                kind=str(config.get("kind", "")),
                loops=staged["loop_share"],
                interval=compared_row["speedup_wall_interval"] or (None, None),
            )
    columns = (
        *("sampling", "row", "tokens/s", "over ar", "by counts", "tokens as ar", "accept length"),
        *("traffic, own sizes", "overhead_share", "nodes/pass", "loop_share"),
    )
    findings.table("Measured on this machine", columns, table)
    fig, (left, right) = figure(11.0, 4.2, 2)
    bars(left, shown)
    tidy(left, x="sampling", y="tokens per second (measured, this CPU)", title=item.stated.title)
    legend(left)
    claims_panel(right, item.stated.claims, findings.measures)
    findings.figure = fig
    return findings


def overhead(item: Item, lab: Lab) -> Findings:
    """The share of time outside model calls: measured, and implied by the paper's two tables. Key:
    ``stated`` (label -> list of [plain tokens/s, row's tokens/s, traffic]).
    """
    findings, config = Findings(), item.config
    rows = []
    for label, cells in config["stated"].items():
        for name, plain, speed_of, part in cells:
            bound = plain / part
            implied = 100 * (1 - speed_of / bound)
            rows.append((label, name, bound, speed_of, implied))
            text = f"{label}, {name}: {speed_of} of {bound:.0f} tokens/s that its traffic allows"
            findings.add("overhead", implied, "formula", text)
    columns = ("sampling", "row", "tokens/s by traffic alone", "stated tokens/s", "lost, %")
    findings.table("What Tables 1 and 2 imply", columns, rows)
    for label in config["samplings"]:
        result = compared(item, lab, label)
        row = next(r for r in result["rows"] if r["strategy"] == "staged")
        measured = (100 * row["overhead_share"], "measured", f"staged on this CPU, {label}")
        ends = _overhead_interval(_totals(result)["staged"])
        findings.add("overhead", *measured, loops=row["loop_share"], interval=ends)
    findings.figure = claims_figure(item.stated.claims, findings.measures, item.stated.title)
    return findings


def per_prompt(item: Item, lab: Lab) -> Findings:
    """Fig. 2: speed-ups prompt by prompt; claims ``spread`` and ``above``."""
    findings, config = Findings(), item.config
    fig, axes = figure(9.0, 3.8, len(config["samplings"]))
    table = []
    looks = styles(STRATEGIES)
    for ax, label in zip(axes, config["samplings"], strict=True):
        result = compared(item, lab, label)
        runs = _runs(read_requests(result["folder"] / "requests.jsonl"))
        loops = next(r["loop_share"] for r in result["rows"] if r["strategy"] == "staged")
        ratios = {n: np.sort(prompt_speedups(runs[n], runs["ar"])) for n in STRATEGIES[1:]}
        for name, values in ratios.items():
            shares = (np.arange(len(values)) + 0.5) / len(values)
            ax.plot(values, shares, ms=3.5, label=name, **looks[name].line())
            span = (float(values[0]), float(np.median(values)), float(values[-1]))
            table.append((label, name, *span, len(values), loops))
        tidy(ax, x="speed-up over ar (times, measured)", y="share of prompts below", title=label)
        legend(ax)
        staged, single = ratios["staged"], ratios["speculative"]
        above = float(np.median(staged) / np.median(single))
        spread = float(staged[-1] / staged[0])
        for claim, value, text in (
            ("spread", spread > 1.5, f"best over worst {spread:.1f}"),
            ("above", above > 1.0, f"medians' ratio {above:.2f}"),
        ):
            where = f"{label}, {len(staged)} prompts; {text}"
            findings.add(claim, value, "measured", where, loops=loops)
    columns = ("sampling", "row", "worst prompt", "median", "best prompt", "prompts", "loop_share")
    findings.table("Speed-up over ar per prompt, measured", columns, table)
    findings.figure = fig
    return findings


def _runs(records: Sequence[Any]) -> dict[str, list[Run]]:
    by: dict[tuple[str, int], list[Any]] = {}
    for record in records:
        by.setdefault((record.strategy, record.repeat), []).append(record)
    runs: dict[str, list[Run]] = {}
    for (name, _), of_run in by.items():
        totals = RunTotals.merge([r.totals for r in of_run if r.totals is not None])
        runs.setdefault(name, []).append(Run(tuple(r.result for r in of_run), totals))
    return runs
