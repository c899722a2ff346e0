"""PPSD against other methods (Table 2, Fig. 6, 7) and against another group's measurement."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from experiments.ppsd.exit_runs import rival_runs
from experiments.ppsd.laws import alpha_of_speedup
from experiments.reproduce.drafts import size_overrides
from experiments.reproduce.drawing import line_chart
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from experiments.reproduce.pacing import add_paced

_MEASURED = {  # column -> metric
    **{"runtime": "runtime", "tokens/s": "tokens_per_s", "over ar": "speedup_wall"},
    **{"accepted / judged": "acceptance_rate_verified", "tokens per answer": "acceptance_length"},
    "loop_share": "loop_share",
}


def against_others(item: Item, lab: Lab) -> Findings:
    """Table 2's cells against Table 1's. Keys: ``tokens_per_s`` and ``speedups`` (model -> row ->
    [XSum, GSM8K]), ``table1_gsm8k`` (of L-13B), ``runs`` (see ``rival_runs``), ``paced`` (see
    ``add_paced``)."""
    findings, config = Findings(), item.config
    cells = config["tokens_per_s"]
    where = "ratio of stated tokens/s"
    ratios = {
        (model, i): rows["ppsd"][i] / rows["ts"][i] for model, rows in cells.items() for i in (0, 1)
    }
    for claim, key in (("v13b_xsum", ("V-13B", 0)), ("v13b_gsm8k", ("V-13B", 1))):
        findings.add(claim, ratios[key], "formula", where)
    least = min(ratios.values())
    printed, first = cells["L-13B"]["ppsd"][1], config["table1_gsm8k"]
    medusa = cells["V-13B"]["medusa"][0] / cells["V-13B"]["plain"][0]
    over = min(rows["ppsd"][i] / rows["medusa"][i] for rows in cells.values() for i in (0, 1))
    findings.add("over_ts", least > 1, "formula", f"least {least:.2f}x stated")
    same = abs(printed / first - 1) < 0.01
    findings.add("l13b_cell", same, "formula", f"Table 1 has {first} tokens/s there")
    off = cells_off(cells, config["speedups"])
    text = f"off by more than 2 %: {', '.join(off) or 'none'}"
    findings.add("baselines", not off, "formula", text)
    where = "stated tokens/s over Table 1's autoregressive row"
    findings.add("medusa", medusa, "formula", where)
    findings.add("over_medusa", over > 1, "formula", f"least {over:.2f}x stated")
    rows = tuple(
        (model, name, values[0], values[1], values[0] / by["plain"][0], values[1] / by["plain"][1])
        for model, by in cells.items()
        for name, values in by.items()
    )
    columns = (
        *("model", "row", "XSum tokens/s", "GSM8K tokens/s", "XSum over plain"),
        "GSM8K over plain",
    )
    findings.table("Stated cells", columns, rows)
    rival_runs(item, lab, findings, config["runs"])
    if lab.paced:
        add_paced(config["paced"], lab, findings)
    return findings


def real_model(item: Item, lab: Lab) -> Findings:
    """PPSD and EESD on a real model and its heads: simulated, measured on one device, and paced.

    Keys: ``runs`` (see ``rival_runs``), ``measured`` (``words`` of a comparison, and the ``row``
    whose speed-up over plain decoding is that of ``claim``), ``paced`` (see ``add_paced``).
    """
    findings, config = Findings(), item.config
    runs, measured = config["runs"], config["measured"]
    rival_runs(item, lab, findings, runs)
    table = []
    for name, overrides in runs["data"].items():
        words = [*measured["words"], *runs["model"], *overrides, *size_overrides(item, lab)]
        rows = {row["strategy"]: row for row in lab.compare(words)["rows"]}
        for strategy, row in rows.items():
            cells = (row.get(key) for key in _MEASURED.values())
            table.append((name, strategy, *cells, row["num_differing"] == 0))
        row = rows[measured["row"]]
        ends = tuple(row["speedup_wall_interval"])
        found = {"kind": runs["kind"], "loops": row["loop_share"], "interval": ends}
        where = f"{runs['target']}, {name}, one device"
        findings.add(measured["claim"], row["speedup_wall"], "measured", where, **found)
    columns = ("data", "row", *_MEASURED, "tokens as the first row")
    findings.table("On one device of this machine (measured)", columns, table)
    if lab.paced:
        add_paced(config["paced"], lab, findings)
    return findings


def cells_off(cells: Mapping[str, Any], speedups: Mapping[str, Any]) -> list[str]:
    """Stated speed-ups that are not their tokens/s over those of the model's "plain" row.

    Args:
        cells: tokens per second, model -> row -> [XSum, GSM8K].
        speedups: as stated, of the same keys.
    """
    off = []
    for model, rows in speedups.items():
        for name, stated in rows.items():
            for i, data in enumerate(("XSum", "GSM8K")):
                own = cells[model][name][i] / cells[model]["plain"][i]
                if abs(own / stated[i] - 1.0) > 0.02:
                    off.append(f"{model} {name} {data} ({stated[i]:.2f} stated, {own:.2f})")
    return off


def independent(item: Item, lab: Lab) -> Findings:
    """Another group's measurement: implied alpha, and the cost per step that explains its times.

    With T a pass and n stages, wall / theory = (T / n) / (T / n + c). Keys: ``rows``: [model,
    temperature, stages, theoretical, wall]; ``pass_ms`` (T of the first model), ``claims``.
    """
    findings, config = Findings(), item.config
    rows: list[tuple[Any, ...]] = []
    first, pass_ms = config["rows"][0][0], config["pass_ms"]
    for model, temperature, stages, theory, wall in config["rows"]:
        kept = wall / theory
        cost = pass_ms / stages * (1 / kept - 1) if model == first else None
        alpha = alpha_of_speedup(theory, 1, stages)
        rows.append((model, temperature, stages, theory, wall, kept, alpha, cost))
    greedy = [row for row in rows if row[0] == first and row[1] == 0]

    def law(stages: float, per_step: float) -> float:
        return float(pass_ms / stages / (pass_ms / stages + per_step))

    for stages, claim in config["claims"].items():
        per_step = fmean(row[7] for row in greedy if row[2] != stages)
        where = (
            f"cost of {per_step:.2f} ms per step from the other rows, beside {pass_ms} ms / stages"
        )
        findings.add(claim, law(stages, per_step), "formula", where)
    columns = (
        *("model", "temperature", "stages", "theoretical", "wall", "wall / theory"),
        *("alpha by Eq. 6", "cost per step, ms"),
    )
    findings.table("Measured by others", columns, rows)
    xs = [2, 4, 6, 8, 12, 16, 24]
    per_step = fmean(row[7] for row in greedy)
    series = {
        f"one cost of {per_step:.2f} ms per step": (xs, [law(n, per_step) for n in xs]),
        f"{first}, measured by others": ([r[2] for r in greedy], [r[5] for r in greedy]),
    }
    findings.figure = line_chart(series, x="stages", y="wall over theory", title=item.stated.title)
    return findings


def cases(item: Item, lab: Lab) -> Findings:
    """Fig. 6 and 7: plain decoding and PPSD give the same text (measured, real models)."""
    findings = Findings()
    words = ["strategies=[ar,ppsd]", "data=stdlib", *size_overrides(item, lab)]
    row = next(row for row in lab.compare(words)["rows"] if row["strategy"] == "ppsd")
    text = f"{row['num_compared']} prompts compared, {row['num_differing']} differ"
    findings.add("same", bool(row["lossless"]), "measured", text, loops=row["loop_share"])
    return findings
