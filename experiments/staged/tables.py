"""Staged speculative decoding (2308.04623): traffic, speed, spread over prompts, tokens by origin.

Everything here runs real models on this machine; the paper's is a 762M target on an RTX 4090. Its
relative memory traffic is also given with the run's own passes and the paper's sizes of the models.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reproduce.drawing import bars, below, claims_figure, figure, legend, tidy
from experiments.reproduce.findings import Findings, Measure, Table
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from specdec.metrics import Run, RunTotals
from specdec.metrics.compare import prompt_speedups
from specdec.report import read_requests

STRATEGIES = ("ar", "speculative", "staged")


def data_words() -> list[str]:
    """HumanEval where its file is, else function heads of the standard library."""
    return ["data=humaneval" if os.environ.get("SPECDEC_DATA") else "data=stdlib"]


def compared(item: Item, lab: Lab, sampling: str) -> dict[str, Any]:
    """Plain, speculative and staged decoding of the same prompts, interleaved.

    Keys of the config: ``words`` (further overrides), ``repeats``.
    """
    prompts, tokens = item.size["quick" if lab.quick else "full"]
    repeats = 1 if lab.quick else item.config.get("repeats", 3)
    return lab.compare(
        [
            f"strategies=[{','.join(STRATEGIES)}]",
            *data_words(),
            f"data.limit={prompts}",
            f"max_new_tokens={tokens}",
            f"sampling={sampling}",
            f"repeats={repeats}",
            "threads=1",
            *item.config.get("words", ()),
        ]
    )


def relative_traffic(row: Mapping[str, Any], draft_share: float) -> float:
    """(target_passes + draft_passes B_d / B_t) / tokens, B_d / B_t given."""
    return float((row["target_passes"] + row["draft_passes"] * draft_share) / row["new_tokens"])


def traffic(item: Item, lab: Lab) -> Findings:
    """Table 1: relative memory traffic. Keys: ``samplings`` (label -> option), ``paper_share``
    (draft over target weights in the paper), ``claims`` (label -> strategy -> claim)."""
    found, config = Findings(), item.config
    table = []
    for label, sampling in config["samplings"].items():
        rows = {r["strategy"]: r for r in compared(item, lab, sampling)["rows"]}
        for name, row in rows.items():
            scaled = relative_traffic(row, config["paper_share"] if name != "ar" else 0.0)
            own = row["relative_memory_traffic"]
            table.append(
                (
                    label,
                    name,
                    own,
                    scaled,
                    row["acceptance_length"],
                    row["draft_passes"] / row["new_tokens"],
                    row["loop_share"],
                )
            )
            claim = config["claims"][label].get(name)
            for value, text in ((own, "own sizes"), (scaled, "the paper's sizes")):
                if claim:
                    found.add(
                        claim,
                        value,
                        "measured",
                        f"counts of the bundled pair, {data_words()[0]}; {text}",
                        loops=row["loop_share"],
                    )
    columns = (
        "sampling",
        "row",
        "own sizes",
        "the paper's sizes",
        "accept length",
        "draft passes/token",
        "loop_share",
    )
    found.tables.append(
        Table("Relative memory traffic (counts of runs, exact)", columns, tuple(table))
    )
    found.notes += list(config.get("notes", ()))
    found.figure = claims_figure(item.stated.claims, found.measures, item.stated.title)
    return found


def speed(item: Item, lab: Lab) -> Findings:
    """Table 2: tokens per second. Keys: ``samplings``, ``claims`` (label -> [claim of staged over
    plain, of staged over speculative])."""
    found, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    shown: dict[str, dict[str, float | None]] = {}
    for label, sampling in config["samplings"].items():
        rows = {r["strategy"]: r for r in compared(item, lab, sampling)["rows"]}
        staged, single = rows["staged"], rows["speculative"]
        for name, row in rows.items():
            table.append(
                (
                    label,
                    name,
                    row["tokens_per_s"],
                    row["speedup_wall"],
                    row["speedup_theoretical"],
                    row["lossless"],
                    row["overhead_share"],
                    row["loop_share"],
                )
            )
        shown[label] = {name: row["tokens_per_s"] for name, row in rows.items()}
        over_plain, over_single = config["claims"][label]
        interval = staged["speedup_wall_interval"] or (None, None)
        where = f"this CPU, bundled pair, {data_words()[0]}, {label}"
        loops = staged["loop_share"]
        ratio = staged["tokens_per_s"] / single["tokens_per_s"]
        found.measures += [
            Measure(
                claim=over_plain,
                value=staged["speedup_wall"],
                kind="measured",
                conditions=where,
                low=interval[0],
                high=interval[1],
                loop_share=loops,
            ),
            Measure(
                claim=over_single, value=ratio, kind="measured", conditions=where, loop_share=loops
            ),
        ]
    columns = (
        "sampling",
        "row",
        "tokens/s",
        "over ar",
        "by counts",
        "tokens as ar",
        "overhead_share",
        "loop_share",
    )
    found.tables.append(Table("Measured on this machine", columns, tuple(table)))
    found.missing += list(config.get("absent", ()))
    made, (ax,) = figure(6.5, 3.8)
    bars(ax, shown)
    tidy(ax, x="sampling", y="tokens per second (measured, this CPU)", title=item.stated.title)
    legend(ax)
    found.figure = made
    return found


def overhead(item: Item, lab: Lab) -> Findings:
    """The share of time outside model calls: ours, and what the paper's two tables imply.

    Keys: ``samplings``, ``stated`` (label -> list of [plain tokens/s, row's tokens/s, traffic]).
    """
    found, config = Findings(), item.config
    rows = []
    for label, cells in config["stated"].items():
        for name, plain, speed_of, share in cells:
            bound = plain / share
            implied = 100 * (1 - speed_of / bound)
            rows.append((label, name, bound, speed_of, implied))
            found.add(
                "overhead",
                implied,
                "formula",
                (f"{label}, {name}: {speed_of} of {bound:.0f} tokens/s that its traffic allows"),
            )
    columns = ("sampling", "row", "tokens/s by traffic alone", "stated tokens/s", "lost, %")
    found.tables.append(Table("What Tables 1 and 2 imply", columns, tuple(rows)))
    for label, sampling in config["samplings"].items():
        row = next(r for r in compared(item, lab, sampling)["rows"] if r["strategy"] == "staged")
        found.add(
            "overhead",
            100 * row["overhead_share"],
            "measured",
            f"staged on this CPU, {label}",
            loops=row["loop_share"],
        )
    found.figure = claims_figure(item.stated.claims, found.measures, item.stated.title)
    return found


def per_prompt(item: Item, lab: Lab) -> Findings:
    """Fig. 2: speed-ups prompt by prompt. Keys: ``samplings``, claims ``spread`` and ``above``."""
    found, config = Findings(), item.config
    made, axes = figure(9.0, 3.8, len(config["samplings"]))
    table = []
    for ax, (label, sampling) in zip(axes, config["samplings"].items(), strict=True):
        result = compared(item, lab, sampling)
        runs = _runs(read_requests(result["folder"] / "requests.jsonl"))
        loops = next(r["loop_share"] for r in result["rows"] if r["strategy"] == "staged")
        ratios = {n: np.sort(prompt_speedups(runs[n], runs["ar"])) for n in STRATEGIES[1:]}
        for name, values in ratios.items():
            ax.plot(
                values, (np.arange(len(values)) + 0.5) / len(values), marker="o", ms=3.5, label=name
            )
            table.append(
                (
                    label,
                    name,
                    float(values[0]),
                    float(np.median(values)),
                    float(values[-1]),
                    len(values),
                    loops,
                )
            )
        tidy(ax, x="speed-up over ar (times, measured)", y="share of prompts below", title=label)
        legend(ax)
        staged, single = ratios["staged"], ratios["speculative"]
        above = float(np.median(staged) / np.median(single))
        spread = float(staged[-1] / staged[0])
        for claim, value, text in (
            ("spread", spread > 1.5, f"best over worst {spread:.1f}"),
            ("above", above > 1.0, f"medians' ratio {above:.2f}"),
        ):
            found.add(
                claim, value, "measured", f"{label}, {len(staged)} prompts; {text}", loops=loops
            )
    columns = ("sampling", "row", "worst prompt", "median", "best prompt", "prompts", "loop_share")
    found.tables.append(Table("Speed-up over ar per prompt, measured", columns, tuple(table)))
    found.figure = made
    return found


def _runs(records: Sequence[Any]) -> dict[str, list[Run]]:
    """strategy -> one run per repeat."""
    by: dict[tuple[str, int], list[Any]] = {}
    for record in records:
        by.setdefault((record.strategy, record.repeat), []).append(record)
    runs: dict[str, list[Run]] = {}
    for (name, _), found in by.items():
        totals = RunTotals.merge([r.totals for r in found if r.totals is not None])
        runs.setdefault(name, []).append(Run(tuple(r.result for r in found), totals))
    return runs


def roofline(item: Item, lab: Lab) -> Findings:
    """Fig. 1: arithmetic on the stated speeds. Keys: ``parameters``, ``bytes``, ``tokens_per_s``,
    ``peak_flops``, ``peak_bytes``, ``traffic`` (label -> relative traffic)."""
    found, config = Findings(), item.config
    flops = 2.0 * config["parameters"] * config["tokens_per_s"]
    moved = config["parameters"] * config["bytes"] * config["tokens_per_s"]
    where = "arithmetic: 2 operations and 2 bytes per parameter and token"
    found.measures += [
        Measure(claim="intensity", value=flops / moved, kind="formula", conditions=where),
        Measure(
            claim="utilisation",
            value=100 * flops / config["peak_flops"],
            kind="formula",
            conditions=f"{where}; {config['peak_flops'] / 1e12:.0f} TFLOP/s",
        ),
    ]
    points = {"baseline": 1.0, **config["traffic"]}
    rows = tuple((n, 1.0 / t, 100 * moved / config["peak_bytes"]) for n, t in points.items())
    found.tables.append(
        Table(
            "Operations per byte of weights",
            ("row", "FLOP/byte", "bandwidth used by the baseline, %"),
            rows,
        )
    )
    made, (ax,) = figure(6.5, 4.0)
    xs = np.logspace(-1, 3, 60)
    roof = np.minimum(xs * config["peak_bytes"], config["peak_flops"]) / 1e12
    ax.plot(xs, roof, color="#4a4a4a", lw=1.4, label="RTX 4090 (public figures)")
    for i, (name, share) in enumerate(points.items()):
        speed_of = config["speeds"][name] * 2.0 * config["parameters"] / 1e12
        ax.plot([1.0 / share], [speed_of], lw=0, marker="os^Dv"[i], ms=7, label=f"{name}, stated")
    ax.set_xscale("log")
    ax.set_yscale("log")
    tidy(
        ax,
        x="arithmetic intensity (FLOP per byte)",
        y="useful TFLOP/s (computed)",
        title=item.stated.title,
    )
    legend(ax)
    found.figure = made
    return found


def origins(item: Item, lab: Lab) -> Findings:
    """Fig. 3: a text by which model could have given each token.

    A token counts for the n-gram model when it is among its ``guesses`` best after the two tokens
    before it; else for the draft when the target accepted it from the tree; else for the target.
    """
    found, config = Findings(), item.config
    pair = lab.models()
    katz = pair.katz()
    result = compared(item, lab, config["sampling"])
    records = [
        r for r in read_requests(result["folder"] / "requests.jsonl") if r.strategy == "staged"
    ]
    names = ("n-gram", "draft", "target")
    counts = {"white space": dict.fromkeys(names, 0), "other": dict.fromkeys(names, 0)}
    shown: list[tuple[str, str]] = []
    longest = max(range(len(records)), key=lambda i: len(records[i].result.output))
    for number, record in enumerate(records):
        output = np.asarray(record.result.output)
        width = katz.order - 1
        windows = [output[i - width : i] for i in range(width, len(output))]
        if not windows:
            continue
        best, _ = katz.top(np.stack(windows), config["guesses"])
        for i, guesses in zip(range(width, len(output)), best, strict=True):
            drafted = record.result.origins[i] >= 0
            origin = "n-gram" if output[i] in guesses else "draft" if drafted else "target"
            text = str(pair.tokenizer.decode([int(output[i])]))
            counts["other" if text.strip() else "white space"][origin] += 1
            if number == longest:
                shown.append((text, origin))
    loops = next(r["loop_share"] for r in result["rows"] if r["strategy"] == "staged")
    shares = {
        kind: {n: c / max(1, sum(found_.values())) for n, c in found_.items()}
        for kind, found_ in counts.items()
    }
    rows = tuple(
        (kind, *(shares[kind][n] for n in names), sum(counts[kind].values())) for kind in counts
    )
    found.tables.append(Table("Share of tokens by origin", ("tokens", *names, "count"), rows))
    value = shares["white space"]["n-gram"]
    found.add(
        "white_space",
        value > shares["other"]["n-gram"],
        "measured",
        (
            f"{100 * value:.0f} % of white space,"
            f" {100 * shares['other']['n-gram']:.0f} % of the rest"
        ),
        loops=loops,
    )
    found.figure = _coloured(shown, item.stated.title)
    return found


def _coloured(shown: Sequence[tuple[str, str]], title: str) -> Any:
    """Text with a coloured ground per token, in a grid of letters."""
    colors = {"n-gram": "#bfe3bf", "draft": "#c6d8f0", "target": "#f3c1c1"}
    columns, row, column = 84, 0, 0
    num_lines = sum(1 + len(part) // columns for part in "".join(t for t, _ in shown).split("\n"))
    made, (ax,) = figure(8.6, 1.4 + 0.16 * num_lines)
    for text, origin in shown:
        for letter in text.replace("\t", "    "):
            if letter == "\n" or column >= columns:
                row, column = row + 1, 0
            mark = "." if letter == " " else letter
            if letter != "\n":
                ax.add_patch(_square(column, row, colors[origin]))
                ax.text(
                    column + 0.5, row + 0.7, mark, fontsize=6.5, family="monospace", ha="center"
                )
                column += 1
    for origin, color in colors.items():
        ax.plot([], [], marker="s", lw=0, ms=8, color=color, label=origin)
    ax.set_xlim(0, columns)
    ax.set_ylim(row + 1, 0)
    tidy(ax, x="letters of a line", y="lines", title=title)
    below(ax, 3)
    return made


def _square(column: int, row: int, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column, row), 1, 1, color=color, lw=0)
