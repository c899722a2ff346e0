"""PPSD's tables from its own acceptance rates: formula checks, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from experiments.ppsd.exit_runs import add_runs, draft_length_runs
from experiments.ppsd.laws import (
    alpha_of_overall,
    eq4_speedup,
    eq5_acceptance,
    eq6_speedup,
    eq7_gain,
    paid_speedup,
)
from experiments.reproduce.drawing import band, doublings, figure, legend, lines, styles, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from experiments.reproduce.pacing import add_paced
from specdec.sources.early_exit import ppsd_law

SETS = ("XSum", "GSM8K", "HumanEval")
_CELL = (
    *("model", "method", "E / N", "set", "AR %", "tokens/s", "SR stated", "SR from tokens/s"),
    *("SR by the law", "stated / law", "SR, heads paid by weight", "stated / it"),
)


def cells(item: Item, lab: Lab) -> Findings:
    """Stated cells beside Eq. 6 (PPSD) and Eq. 4 with Eq. 5 (EESD) at their own acceptance rates.

    Keys: ``rows``: [model, method, N, E, gamma, [per set: AR %, tokens/s, SR]], gamma 0 for PPSD;
    ``plain``: model -> tokens/s per set; ``output``: model -> weights of an output matrix over a
    layer's; ``claims``: claim -> [model, method, set], "mean" for all sets; ``bound``, ``paid``
    (as ``bound`` with paid heads), ``fair`` (EESD against its own law) and ``consistent``.
    """
    findings, config = Findings(), item.config
    table = [cell for row in config["rows"] for cell in _cells(row, config)]
    findings.table("Formula check of every stated cell", _CELL, table)
    ppsd = [cell for cell in table if str(cell[1]).startswith("PPSD")]
    for claim, (model, method, which) in config.get("claims", {}).items():
        chosen = [c for c in table if c[0] == model and c[1] == method and which in ("mean", c[3])]
        law = float(np.mean([cell[8] for cell in chosen]))
        equation = "Eq. 6" if method.startswith("PPSD") else "Eq. 4 and 5"
        start = f"{equation} at AR of" if which != "mean" else f"mean of {equation},"
        findings.add(claim, law, "formula", f"{start} {model}, {method}")
        if method.startswith("PPSD"):
            law = float(np.mean([cell[10] for cell in chosen]))
            text = f"Eq. 6 with heads paid by weight, {model}, {method}"
            findings.add(claim, law, "formula", text)
    for name, column in (("bound", 9), ("paid", 11)):
        above = [cell for cell in ppsd if cell[column] > 1.02]
        worst = max(ppsd, key=lambda cell: cell[column])
        text = f"{len(above)} of {len(ppsd)} cells above by more than 2 %"
        text += f"; {worst[0]} {worst[3]} {worst[column]:.2f} of it"
        findings.add(config[name], not above, "formula", text)
    eesd = [cell[9] for cell in table if not str(cell[1]).startswith("PPSD")]
    text = f"EESD's cells are {min(eesd):.2f} to {max(eesd):.2f} of Eq. 4 and 5, PPSD's"
    text += f" {min(cell[9] for cell in ppsd):.2f} to {max(cell[9] for cell in ppsd):.2f} of Eq. 6"
    findings.add(config["fair"], min(eesd) >= 0.9, "formula", text)
    off = [cell for cell in table if abs(cell[7] / cell[6] - 1) > 0.02]
    names = ", ".join(f"{c[0]} {c[1]} {c[3]} ({c[6]:.2f} stated, {c[7]:.2f})" for c in off)
    text = f"{len(off)} of {len(table)} cells are off by more than 2 %" + (
        f": {names}" if off else ""
    )
    findings.add(config["consistent"], not off, "formula", text)
    stated: dict[str, list[tuple[float, float]]] = {}
    for cell in table:
        stated.setdefault(str(cell[1]).split(",")[0], []).append((cell[8], cell[6]))
    findings.figure = _law_figure(item, stated, add_runs(item, lab, findings, config["runs"]))
    if lab.paced and "paced" in config:
        add_paced(config["paced"], lab, findings)
    return findings


def _cells(row: Sequence[Any], config: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    model, method, layers, exit_layer, gamma, values = row
    cells: list[tuple[Any, ...]] = []
    for name, (rate, speed, ratio), base in zip(SETS, values, config["plain"][model], strict=True):
        law = eq6_speedup(rate / 100, exit_layer, layers)
        paid = paid_speedup(rate / 100, exit_layer, layers, config["output"][model])
        if gamma:
            law = eq4_speedup(alpha_of_overall(rate / 100, gamma), gamma, exit_layer, layers)
        stated = (model, method, f"{exit_layer}/{layers}", name, rate, speed, ratio)
        heads = (None, None) if gamma else (paid, ratio / paid)
        cells.append((*stated, speed / base, law, ratio / law, *heads))
    return cells


Points = Sequence[tuple[float, float]]


def _law_figure(item: Item, stated: Mapping[str, Points], runs: Points) -> Any:
    """Speed-ups against those of the equation: stated cells by group, and our runs."""
    fig, (ax,) = figure(6.8, 5.0)
    groups = {**stated, "bundled target, run (simulated)": runs}
    looks = styles(groups)
    for i, (name, points) in enumerate(groups.items()):
        xs, ys = zip(*points, strict=True)
        look = {"color": looks[name].color, "marker": "os^Dv"[i % 5]}
        ax.plot(xs, ys, lw=0, ms=5, label=name, **look)
    ends = [value for points in groups.values() for point in points for value in point]
    span = (0.95 * min(ends), 1.05 * max(ends))
    ax.plot(span, span, color="#444444", ls="--", lw=0.9, label="as the law")
    x = "speed-up by the law at the acceptance rate (times)"
    tidy(ax, x=x, y="speed-up, stated or run (times)", title=item.stated.title)
    legend(ax)
    return fig


def exits(item: Item, lab: Lab) -> Findings:
    """Tables 3, 6, 7: stated speed-ups over exit positions beside both forms of Eq. 6.

    Keys: ``rows``: [model, head, N, E, [per set: AR %, SR]]; ``follows`` (a claim that the cells
    follow Eq. 6 within ``within`` per cent) and ``best`` (claim -> [model, head,
    exit layer]), ``runs`` (see ``add_runs``).
    """
    findings, config = Findings(), item.config
    table = []
    for model, head, layers, exit_layer, values in config["rows"]:
        for name, (rate, ratio) in zip(SETS, values, strict=True):
            law = eq6_speedup(rate / 100, exit_layer, layers)
            small = ppsd_law(exit_layer, layers, layers).speedup(rate / 100)
            cell = (model, head, exit_layer, layers, name, rate, ratio)
            table.append((*cell, law, small, ratio / small))
    columns = (
        *("model", "head", "E", "N", "set", "AR %", "SR stated", "Eq. 6", "Eq. 6 with S < E"),
        "stated / law",
    )
    findings.table("Formula check of every stated cell", columns, table)
    off = [
        abs(row[6] / min((row[7], row[8]), key=lambda law: abs(law - row[6])) - 1) for row in table
    ]
    inside = sum(error <= config["within"] / 100 for error in off)
    text = f"{inside} of {len(off)} cells within {config['within']} % of the nearer form"
    text += f"; worst {100 * max(off):.0f} %"
    findings.add(config["follows"], inside == len(off), "formula", text)
    for claim, (*which, claimed) in config.get("best", {}).items():
        speedups: dict[int, list[float]] = {}
        for row in table:
            if list(row[:2]) == which:
                speedups.setdefault(row[2], []).append(row[6])
        means = {exit_layer: float(np.mean(values)) for exit_layer, values in speedups.items()}
        text = "means " + ", ".join(f"E={e}: {m:.2f}x" for e, m in means.items())
        findings.add(claim, max(means, key=means.__getitem__) == claimed, "formula", text)
    stated: dict[str, list[tuple[float, float]]] = {}
    for row in table:
        stated.setdefault(f"{row[0]}, {row[1]}", []).append((row[8], row[6]))
    findings.figure = _law_figure(item, stated, add_runs(item, lab, findings, config["runs"]))
    return findings


def draft_lengths(item: Item, lab: Lab) -> Findings:
    """Fig. 1 by Eq. 4 and 5, and by runs. Keys: ``alphas``, ``layers``, ``exit_layer``, ``gammas``,
    ``runs`` (see ``draft_length_runs``)."""
    findings, config = Findings(), item.config
    gammas, layers, exit_layer = config["gammas"], config["layers"], config["exit_layer"]
    fig, (left, right) = figure(9.5, 3.9, 2)
    rates, speeds, rows = {}, {}, []
    for alpha in config["alphas"]:
        name = f"alpha = {alpha}"
        rates[name] = (gammas, [eq5_acceptance(alpha, g) for g in gammas])
        speeds[name] = (gammas, [eq4_speedup(alpha, g, exit_layer, layers) for g in gammas])
        rows += [
            (alpha, g, a, s, eq6_speedup(alpha, exit_layer, layers))
            for g, a, s in zip(gammas, rates[name][1], speeds[name][1], strict=True)
        ]
    columns = ("alpha", "draft length", "Eq. 5 overall acceptance", "Eq. 4 EESD", "Eq. 6 PPSD")
    findings.table(f"By the laws, E = {exit_layer} of {layers}", columns, rows)
    falls = all(all(b < a for a, b in pairwise(ys)) for _, ys in rates.values())
    peaks = all(0 < int(np.argmax(ys)) < len(ys) - 1 for _, ys in speeds.values())
    tops = ", ".join(f"{n}: gamma {gammas[int(np.argmax(ys))]}" for n, (_, ys) in speeds.items())
    findings.add("falls", falls, "formula", "Eq. 5")
    findings.add("peaks", peaks, "formula", f"Eq. 4 peaks at {tops}")
    run_rates, run_speeds = draft_length_runs(item, lab, findings, config["runs"])
    name = f"run, E = {config['runs']['exit_layer']} of 24"
    lines(left, {**rates, name: run_rates})
    lines(right, {**speeds, name: run_speeds})
    x, title = "draft length (tokens)", "alpha: by the laws; run: simulated"
    tidy(left, x=x, y="overall acceptance rate")
    tidy(right, x=x, y="speed-up of EESD (times)", title=title)
    legend(left)
    legend(right)
    findings.figure = fig
    return findings


def no_verification(item: Item, lab: Lab) -> Findings:
    """Fig. 3: time of 512 tokens without verification, with every draft token accepted.

    EESD: tokens / gamma rounds of gamma E + N layers; PPSD: E layers per token. Keys: ``layers``,
    ``exit_layer``, ``tokens``, ``pass_ms``, ``gammas``.
    """
    findings, config = Findings(), item.config
    per_layer = config["pass_ms"] / config["layers"] / 1e3
    gammas, exit_layer = config["gammas"], config["exit_layer"]
    eesd = [config["tokens"] / g * (g * exit_layer + config["layers"]) * per_layer for g in gammas]
    ppsd = config["tokens"] * exit_layer * per_layer
    rows = [(g, s, ppsd) for g, s in zip(gammas, eesd, strict=True)]
    findings.table("Seconds for all tokens, computed", ("draft length", "EESD", "PPSD"), rows)
    text = f"EESD {min(eesd):.1f} s at its best length, PPSD {ppsd:.1f} s"
    findings.add("lowest", ppsd < min(eesd), "formula", text)
    fig, (ax,) = figure(6.0, 3.7)
    lines(ax, {"EESD": (gammas, eesd)})
    band(ax, ppsd, ppsd, "PPSD")
    doublings(ax, gammas)
    y = "time for 512 tokens (s, computed)"
    tidy(ax, x="draft length (tokens)", y=y, title=item.stated.title)
    legend(ax)
    findings.figure = fig
    return findings


def equations(item: Item, lab: Lab) -> Findings:
    """Statements of the text about Eq. 5 to 7, over a grid.

    Keys: ``alphas``, ``layers``, ``exits``, ``gammas``.
    """
    findings, config = Findings(), item.config
    layers = config["layers"]
    at_one = all(abs(eq6_speedup(1.0, e, layers) - layers / e) < 1e-9 for e in config["exits"])
    worst = min(config["exits"], key=lambda e: eq6_speedup(0.0, e, layers))
    least = eq6_speedup(0.0, worst, layers)
    grid = [
        (a, e, g, eq7_gain(a, g, e, layers))
        for a, e, g in product(config["alphas"], config["exits"], config["gammas"])
    ]
    alpha, exit_layer, gamma, lowest = min(grid, key=lambda row: row[3])
    findings.add("perfect", at_one, "formula", f"N = {layers}, E of {config['exits']}")
    where = f"least {least:.3f}x at E = {worst}, N = {layers}: only where E divides N"
    findings.add("nothing", least >= 1.0, "formula", where)
    where = f"least {lowest:.3f} at alpha {alpha}, E = {exit_layer}, gamma = {gamma}"
    findings.add("better", lowest > 1.0, "formula", where)
    gain, stated = eq7_gain(1.0, 5, layers // 4, layers), 5 + 4
    where = f"{gain:.2f} at gamma = 5, E = N / 4, not {stated}: (gamma + N / E) / (gamma + 1)"
    findings.add("ones", abs(gain / stated - 1.0) < 0.01, "formula", where)
    columns = ("alpha", "E", "gamma", "Eq. 7")
    worst_rows = sorted(grid, key=lambda row: row[3])[:8]
    findings.table("PPSD over EESD where it is least", columns, worst_rows)
    return findings


def shapes(item: Item, lab: Lab) -> Findings:
    """Table 5: number of parameters from the shapes.

    Keys: ``models`` (claim -> [layers, hidden, ffn, key and value size over hidden]), ``vocab``.
    """
    findings, config = Findings(), item.config
    rows = []
    for claim, (layers, hidden, ffn, kv) in config["models"].items():
        layer = (2 + 2 * kv) * hidden**2 + 3 * hidden * ffn
        total = (layers * layer + 2 * config["vocab"] * hidden) / 1e9
        rows.append((claim, layers, hidden, ffn, total))
        findings.add(claim, total, "formula", f"{layers} layers of {hidden} / {ffn}")
    findings.table("Parameters", ("model", "layers", "hidden", "FFN", "billions"), rows)
    return findings
