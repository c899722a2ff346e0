"""Accuracy of token trees: SpecPipe Fig. 7, 10, 14 and PipeDec Fig. 3, 4, 6.

Accuracy is "the proportion of speculative tree layers containing the ground-truth token": for a
pipeline with one level per step its hit rate, for a static tree the share of accepted levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pipelines.token_times import run_rows
from experiments.reproduce.drafts import SIMULATED, Draft, drafts, size_overrides
from experiments.reproduce.drawing import band, doublings, figure, legend, line_chart, lines, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.intervals import hits_of, interval, share
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome
from specdec.config.job import run_job_of
from specdec.pairs.record import Record, read_record
from specdec.sources.synthetic import SyntheticPair

_LAW = ("weights", "top1", "decay", "miss")


def tree_sizes(item: Item, lab: Lab) -> Findings:
    """TBT and accuracy over tree width and children.

    Keys: ``common``, ``strategy``, ``drafts``, ``widths``, ``children``, ``choice`` ([width,
    children]), and the claims ``saturates``, ``few_children``, ``optimum``.
    """
    findings, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    first: dict[tuple[int, int], Outcome] = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        cells: dict[tuple[int, int], Outcome] = {}
        for children, width in product(config["children"], config["widths"]):
            overrides = [f"policy.width={width}", f"policy.children={children}"]
            run = cells[width, children] = lab.run(draft.words(*config["common"], *overrides))
            shown = (run.summary["hit_rate"], run.tbt_ms, run.summary["loop_share"])
            table.append((draft.title, width, children, *shown))
        _add_size_measures(findings, config, draft, cells)
        first = first or cells
    columns = ("draft", "width", "children", "accuracy (hit rate)", "TBT ms", "loop_share")
    findings.table("Tree parameters, simulated", columns, table)
    fig, (left, right) = figure(10.0, 3.9, 2)
    for ax, pick in ((left, "hit_rate"), (right, "tbt_ms_mean")):
        widths = config["widths"]
        curves = {
            f"{c} children": (widths, [first[w, c].summary[pick] for w in widths])
            for c in config["children"]
            if first
        }
        lines(ax, curves)
        doublings(ax, config["widths"])
        band(ax, config["choice"][0], config["choice"][0], "the paper's choice", vertical=True)
    tidy(left, x="tree width (nodes per level)", y="accuracy (hit rate)")
    tidy(right, x="tree width (nodes per level)", y="time between tokens (ms, simulated)")
    legend(left)
    findings.figure = fig
    return findings


def _add_size_measures(
    findings: Findings,
    config: Mapping[str, Any],
    draft: Draft,
    cells: Mapping[tuple[int, int], Outcome],
) -> None:
    """Adds the three claims.

    ``saturates``: the last doubling gains under 2 points; ``few_children``: the fewest children
    lose over 5 points at the width of the choice; ``optimum``: the choice is within 3 per cent of
    the best cell.
    """
    widths, children = config["widths"], config["children"]
    width, many = config["choice"]
    hit = {key: run.summary["hit_rate"] for key, run in cells.items()}
    ms = {key: run.tbt_ms for key, run in cells.items()}
    gain = 100 * (hit[widths[-1], many] - hit[widths[-2], many])
    loss = 100 * (hit[width, many] - hit[width, children[0]])
    best = min(ms, key=lambda key: ms[key])
    excess = 100 * (ms[width, many] / ms[best] - 1)
    facts = {
        "saturates": (gain < 2.0, f"{widths[-2]} to {widths[-1]} nodes gain {gain:+.1f} points"),
        "few_children": (loss > 5.0, f"{children[0]} children lose {loss:.1f} points"),
        "optimum": (excess <= 3.0, f"best is {best[0]}/{best[1]}, the choice {excess:+.1f} %"),
    }
    for claim, (value, text) in facts.items():
        where, loops = f"{draft.title}: {text}", cells[width, many].summary["loop_share"]
        findings.add(claim, bool(value), "simulated", where, kind=draft.kind, loops=loops)


def top_k(item: Item, lab: Lab) -> Findings:
    """Share of the target's tokens among the draft's k best: recorded pairs, and laws.

    Keys: ``drafts``, ``claims`` (claim -> k; of every record), ``claims_of`` (draft with a law ->
    claims), ``times`` (claims that need the paper's hardware).
    """
    findings, config = Findings(), item.config
    ks = (1, 2, 4, 8, 16, 32)
    table: list[tuple[Any, ...]] = []
    series = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        record = _record_of(draft)
        if record is None:
            cumulated = np.cumsum(SyntheticPair(**_law_of(draft.overrides)).rank_probabilities())
            shares = [float(cumulated[k - 1]) for k in ks]
            table.append((draft.title, "law", *shares, None, None, None))
            for claim in config.get("claims_of", {}).get(draft.name, ()):
                value = shares[ks.index(config["claims"][claim])]
                draft.add(findings, claim, value)
        else:
            shares = [record.top_share(k) for k in ks]
            size = (len(record.requests), sum(r.num_output for r in record.requests))
            loops = float(record.about.get("loop_share") or 0.0)
            table.append((draft.title, "measured", *shares, loops, *size))
            for claim, k in config["claims"].items():
                counts = [(float((r.ranks < k).sum()), r.num_output) for r in record.requests]
                value, ends = shares[ks.index(k)], interval(counts, share)
                findings.add(claim, value, "measured", draft.title, loops=loops, interval=ends)
        series[draft.short] = (ks, shares)
    columns = ("draft", "kind", *(f"top-{k}" for k in ks), "loop_share", "prompts", "tokens")
    findings.table("Hit ratio of the draft's k best tokens", columns, table)
    findings.missing += config.get("times", ())
    fig, (ax,) = figure(7.0, 4.2)
    lines(ax, series)
    for name, k in config["claims"].items():
        low, high = item.stated.claims[name].ends
        ax.plot([k, k], [low, high], lw=7, color="#e0b050", zorder=2)
        ax.plot([k], [high], marker="_", ms=9, color="#c9982e", zorder=2)
    ax.plot([], [], lw=7, color="#e0b050", label="stated for Llama 8B / 1B and 70B")
    doublings(ax, ks)
    y = "share of the target's tokens among them"
    tidy(ax, x="k (candidates)", y=y, title=item.stated.title)
    legend(ax)
    findings.figure = fig
    return findings


def _record_of(draft: Draft) -> Record | None:
    if not any(word == "model=replay" for word in draft.overrides):
        return None
    path = next((w.partition("=")[2] for w in draft.overrides if w.startswith("model.record=")), "")
    if path:
        return read_record(Path(path))
    with resources.as_file(resources.files("specdec.assets") / "records" / "humaneval.npz") as own:
        return read_record(own)


def _law_of(overrides: Sequence[str]) -> dict[str, list[float]]:
    model = run_job_of(["strategy=ar", *overrides]).config["model"]
    return {key: model[key] for key in _LAW}


def quality_overrides(easy: float, fair: float | None = None, sure: float = 0.95) -> list[str]:
    """A synthetic draft: shares of easy and fair positions (default: half of the others), and the
    probability that it is right at an easy one."""
    fair = (1.0 - easy) / 2 if fair is None else fair
    weights = f"[{easy},{fair:.3f},{1.0 - easy - fair:.3f}]"
    law = [f"model.weights={weights}", f"model.top1=[{sure},0.6,0.3]"]
    return ["model=synthetic", *law, "ignore_eos=true"]


def static_or_dynamic(item: Item, lab: Lab) -> Findings:
    """Accuracy against TBT for drafts of rising quality, static trees and the dynamic tree.

    Keys: ``common``, ``static`` (name -> overrides), ``dynamic`` (overrides), ``levels`` (of the
    static tree), ``drafts_static`` and ``drafts_dynamic`` (see ``quality_words``),
    ``claim`` (for each static tree).
    """
    findings, config = Findings(), item.config
    size = size_overrides(item, lab)
    curves: dict[str, tuple[list[float], list[float]]] = {}
    table = []
    rows = {**config["static"], "dynamic tree": config["dynamic"]}
    for name, overrides in rows.items():
        xs, ys = curves.setdefault(name, ([], []))
        is_static = name in config["static"]
        for quality in config["drafts_static" if is_static else "drafts_dynamic"]:
            draft = quality_overrides(*quality)
            run = lab.run([*draft, *size, SIMULATED, *config["common"], *overrides])
            s = run.summary
            accuracy = s["accepted_per_pass"] / config["levels"] if is_static else s["hit_rate"]
            xs.append(accuracy)
            ys.append(run.tbt_ms)
            table.append((name, *quality, xs[-1], ys[-1], s["steps_per_token"], s["loop_share"]))
    columns = (
        *("tree", "sure positions", "fair positions", "right where sure", "accuracy", "TBT ms"),
        *("steps/token", "loop_share"),
    )
    findings.table("Simulated, synthetic drafts", columns, table)
    dynamic = curves["dynamic tree"]
    for name in config["static"]:
        shared = _shared_grid(curves[name][0], dynamic[0])
        other, ours = (np.interp(shared, *map(np.asarray, c)) for c in (curves[name], dynamic))
        lower = bool((ours < other).all()) if len(shared) else None
        where = f"{name}: no shared accuracy"
        if len(shared):
            ratio = ours / other
            where = f"{name}, accuracies {shared[0]:.2f} to {shared[-1]:.2f}: the dynamic tree's"
            where += f" TBT is {ratio.min():.2f} to {ratio.max():.2f} of it"
        findings.add(config["claim"], lower, "simulated", where)
    y, x = "TBT (ms, simulated)", "accuracy (share of levels with the right token)"
    title = "synthetic drafts of rising quality"
    findings.figure = line_chart(curves, x=x, y=y, title=title, size=(7.0, 4.6))
    return findings


def _shared_grid(*xs: Sequence[float]) -> Any:
    low, high = max(min(x) for x in xs), min(max(x) for x in xs)
    return np.linspace(low, high, 9) if low < high else np.zeros(0)


def by_depth(item: Item, lab: Lab) -> Findings:
    """Accuracy of dynamic trees at several pipeline depths, and of a static tree (PipeDec Fig. 6).

    Keys: ``drafts``, ``dynamic`` and ``static`` (label -> overrides), ``levels``, claims
    ``higher`` (dynamic above static) and ``with_depth`` (the deepest loses under ``points``).
    """
    findings, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        dynamic = run_rows(lab, draft, [], config["dynamic"])
        static = run_rows(lab, draft, [], config["static"])
        accuracy = {name: run.summary["hit_rate"] for name, run in dynamic.items()}
        still = {n: r.summary["accepted_per_pass"] / config["levels"] for n, r in static.items()}
        first = next(iter(dynamic.values()))
        ends_of = {name: interval(hits_of(run.results), share) for name, run in dynamic.items()}
        table += [
            (draft.title, n, a, *ends_of.get(n, (None, None)), first.summary["loop_share"])
            for n, a in {**accuracy, **still}.items()
        ]
        ends = list(accuracy.values())
        series[draft.short] = (config["depths"], ends)
        lost = 100 * (ends[0] - ends[-1])
        least, most = min(ends), max(still.values())
        lost_text = f"{lost:.1f} points lost from the shallowest to the deepest"
        facts = {
            "higher": (least > most, f"{least:.2f} at least, static {most:.2f}"),
            "with_depth": (lost < config["points"], lost_text),
        }
        for claim, (value, fact) in facts.items():
            where, loops = f"{draft.title}: {fact}", first.summary["loop_share"]
            findings.add(config[claim], value, "simulated", where, kind=draft.kind, loops=loops)
    columns = ("draft", "tree", "accuracy", "95 % from", "to", "loop_share")
    findings.table("Accuracy", columns, table)
    x, y = "pipeline stages", "accuracy (hit rate of the dynamic tree)"
    findings.figure = line_chart(series, x=x, y=y, title=item.stated.title, size=(7.0, 4.0))
    return findings
