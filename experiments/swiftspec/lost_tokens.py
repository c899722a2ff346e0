"""Tokens lost by drafting beside the target, over drafts, depths and children per leaf."""

from __future__ import annotations

from statistics import fmean

from experiments.reproduce.arithmetic import computed
from experiments.reproduce.drafts import drafts
from experiments.reproduce.drawing import band, figure, legend, lines, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, speed_ratio

_COLUMNS = (
    *("draft", "d", "children per leaf", "in turns, tokens per pass", "beside, tokens per pass"),
    *("tokens lost, %", "guesses lost, %", "beside over in turns", "loop_share"),
)


def lost(item: Item, lab: Lab) -> Findings:
    """Serial and parallel trees of equal d, bs, w and children.

    Keys: ``drafts``, ``common``, ``serial`` and ``parallel`` (overrides), ``depths``,
    ``children`` (per expanded leaf), ``bs``; claims ``loss`` (accepted guesses per pass lost,
    as Table 6 counts) and ``speedup``, as means over the drafts, ``levels`` (with at least ``bs``
    children, a mean of at most d tokens per pass beside the target and d + 1 in turns),
    ``per_pass`` (the most tokens of a single pass), ``computed``.
    """
    findings, config = Findings(), item.config
    fig, axes = figure(11.0, 4.2, len(config["depths"]))
    rows, bounded = [], True
    longest: dict[tuple[int, str], int] = {}
    sums: dict[tuple[int, int, str], list[tuple[float, float]]] = {}
    series: dict[int, dict[str, tuple[list[float], list[float]]]] = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        for d in config["depths"]:
            line = series.setdefault(d, {}).setdefault(draft.short, ([], []))
            for children in config["children"]:
                overrides = draft.words(*config["common"], f"policy.d={d}")
                overrides.append(f"policy.children={children}")
                base, ours = (lab.run([*overrides, *config[s]]) for s in ("serial", "parallel"))
                tokens, guesses = (
                    100 * (1.0 - ours.summary[key] / base.summary[key])
                    for key in ("acceptance_length", "accepted_per_pass")
                )
                lengths = [run.summary["acceptance_length"] for run in (base, ours)]
                ratio = speed_ratio(ours, base)[0]
                loops = ours.summary["loop_share"]
                rows.append((draft.title, d, children, *lengths, tokens, guesses, ratio, loops))
                sums.setdefault((d, children, draft.kind), []).append((guesses, ratio))
                if children >= config["bs"]:
                    bounded = bounded and lengths[1] <= d and lengths[0] <= d + 1
                    for form, run in (("in turns", base), ("beside the target", ours)):
                        most = max(max(r.counters.path_lengths) for r in run.results)
                        longest[d, form] = max(longest.get((d, form), 0), most)
                line[0].append(float(children))
                line[1].append(guesses)
    for (d, children, kind), values in sums.items():
        where = f"d = {d}, {children} children per leaf; mean of {len(values)} drafts"
        guesses, ratio = (fmean(column) for column in zip(*values, strict=True))
        findings.add(config["loss"], guesses, "simulated", where, kind=kind)
        findings.add(config["speedup"], ratio, "simulated", where, kind=kind)
    findings.add(
        config["levels"], bounded, "simulated", f"all drafts, {config['bs']} children per leaf"
    )
    for (d, form), most in longest.items():
        if d == config["depths"][0]:
            findings.add(
                config["per_pass"], float(most), "simulated", f"d = {d}, {form}, all drafts"
            )
    findings.measures += computed(config)
    findings.table("Equal d, bs, w and children (simulated)", _COLUMNS, rows)
    stated = item.stated.claims[config["loss"]]
    for ax, (d, drawn) in zip(axes, series.items(), strict=True):
        lines(ax, drawn)
        band(ax, *stated.ends, f"stated: {stated.stated}")
        y = "guesses per pass lost (per cent, simulated)"
        tidy(ax, x="children per expanded leaf", y=y, title=f"{d} expansions per pass")
        legend(ax)
    findings.figure = fig
    return findings
