"""PPSD and EESD on a simulated cluster of 8 stages, compared with PPSD's Eq. 4 and 6.

    python -m experiments.ppsd.exit_speedups [--parts ppsd multi eesd tree]
        [--data humaneval gsm8k xsum] [--prompts 16] [--tokens 128] [--samplings t06 greedy]
        [--out outputs/ppsd] [--results experiments/ppsd/results]

ppsd: `ppsd` against `ar` on equal stages (uniform_30ms), beside Eq. 6 at the run's own alpha, and
on a profile in which the exit's stage includes the exit head and its output layer
(ppsd_vicuna7b_exit). multi: an exit chosen per token (`ppsd_multi`, B.3) against each of its exits
alone. eesd: acceptance and speed-up against draft lengths 1 .. 10 (the paper's Fig.
1), beside Eq. 4 and 5. tree: `ppsd_tree` against `ppsd` on a profile in which stages take
longer for more tokens (specpipe_8x3090). All rows of a part share stages and their times.

If the time of a step does not depend on its work, all prompts are decoded in one batch: a request's
times are those of a single request, except for the last round of `eesd`, in which others may still
draft. On ppsd_vicuna7b_exit this holds for `ppsd`, whose exit stage works in every step; `ar` runs
alone. Prompts longer than the context lose their first tokens, and their number is printed.

Prints tables; writes them, bars.csv and bars_fig1.png to --results, where sections of other calls
remain. Runs in --out are reused.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from experiments.pipelines.simulated_runs import Bench, Row
from experiments.ppsd.laws import eq5_acceptance
from experiments.reproduce.drawing import as_png, figure, legend, lines, styles, tidy
from specdec.config.job import run_job_of
from specdec.report.provenance import provenance
from specdec.runs.jobs import prepare

STAGES = 8
EXIT = "model.exit_layer=3"
PIPELINE = ("executor=pipeline", f"executor.stages={STAGES}", EXIT)
TOGETHER = "batch_size=16"
AR = Row("ar", ("strategy=ar", *PIPELINE))
PPSD = Row("ppsd", ("strategy=ppsd", *PIPELINE))
LATE = Row("ppsd, exit at 6", ("strategy=ppsd", *PIPELINE, "model.exit_layer=6"))
MULTI = Row("ppsd_multi, exits at 3 and 6", ("strategy=ppsd_multi", *PIPELINE))
TREE = Row("ppsd_tree", ("strategy=ppsd_tree", *PIPELINE))
GAMMAS = range(1, 11)
UNIFORM = "clock.profile=uniform_30ms"
EXIT_PAID = "clock.profile=ppsd_vicuna7b_exit"
TOKENS_COST = "clock.profile=specpipe_8x3090"
REQUIRED = 0.95
ORDER, DATA = ("ppsd", "multi", "eesd", "tree"), ("humaneval", "gsm8k", "xsum")
HEAD = """# PPSD and EESD against Eq. 4-6, simulated

Written by `python -m experiments.ppsd.exit_speedups`, 8 stages; one section or more per call.
`of ar`, `simulated`: speed-up over plain decoding on the same stages. `loops` is the share of
tokens that end an 8-gram generated before, which flatters every row."""

Key = tuple[str, str, str]
Figure = tuple[str, str, str, str, str, float]


@dataclass(slots=True)
class Report:
    """Collects sections for terminal and file, and figures for the table of all parts.

    Attributes:
        sections: part, data set and sampling -> Markdown.
        figures: part, data set, sampling, row, name and value of each figure.
    """

    sections: dict[Key, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    where: Key = ("", "", "")

    def begin(self, part: str, data: str, sampling: str) -> None:
        """Starts a section."""
        self.where = part, data, sampling
        self.sections[self.where] = ""
        print(f"## {part}: {data}, {sampling}\n", flush=True)

    def store(self, row: str, **values: float) -> None:
        """Stores the figures of a row."""
        self.figures += [(*self.where, row, name, value) for name, value in values.items()]

    def say(self, line: str) -> None:
        """Prints and stores a line."""
        print(line, flush=True)
        self.sections[self.where] = f"{self.sections[self.where]}{line}\n".lstrip("\n")

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A Markdown table."""
        for cells in (heads, ["---"] * len(heads), *rows):
            self.say("| " + " | ".join(cells) + " |")
        self.say("")


Part = Callable[[Bench, str, Report], None]


def main() -> None:
    """Runs the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts: dict[str, Part] = {"ppsd": ppsd, "multi": multi, "eesd": eesd, "tree": tree}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--data", nargs="+", default=["humaneval", "gsm8k", "xsum"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--samplings", nargs="+", default=["t06", "greedy"])
    parser.add_argument("--out", type=Path, default=Path("outputs/ppsd"))
    parser.add_argument("--results", type=Path, default=Path("outputs/ppsd"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report()
    for part in args.parts:
        for sampling in args.samplings:
            for data in args.data:
                size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}")
                common = (f"data={data}", "data.truncation=left", *size)
                bench = Bench(common=common, out=args.out / data)
                _, prompts, cut = prepare(run_job_of(["strategy=ar", *common]).config)
                report.begin(part, data, sampling)
                report.say(
                    f"{len(prompts)} prompts x {args.tokens} tokens at most, {cut} prompts cut."
                    f" {_origin()}\n"
                )
                parts[part](bench, sampling, report)
                write(args.results, report)


def _origin() -> str:
    facts = provenance(command=[], config={})
    git = facts["git"]
    revision = git.get("revision", "unknown")[:10] if git else "unknown"
    return f"Revision {revision}, {facts['time'][:16]}, torch {facts['versions'].get('torch')}."


def write(folder: Path, report: Report) -> None:
    """Writes bars.md, bars.csv and the figure; sections of other calls remain."""
    folder.mkdir(parents=True, exist_ok=True)
    text, table = folder / "bars.md", folder / "bars.csv"
    sections, figures = _read(text, table)
    sections.update(report.sections)
    new = {row[:3] for row in report.figures}
    figures = [row for row in figures if row[:3] not in new] + report.figures
    figures.sort(key=lambda row: _place(*row[:3]))
    ordered = sorted(sections.items(), key=lambda entry: _place(*entry[0]))
    parts = [f"## {part}: {data}, {how}\n\n{body.strip()}" for (part, data, how), body in ordered]
    text.write_text("\n\n".join([HEAD, *parts]) + "\n", encoding="utf-8")
    with open(table, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["part", "data", "sampling", "row", "figure", "value"])
        rows.writerows([*row[:-1], f"{row[-1]:.4f}"] for row in figures)
    if any(row[0] == "eesd" for row in figures):
        draw(folder / "bars_fig1.png", figures)


def _place(part: str, data: str, sampling: str) -> tuple[int, bool, int]:
    return ORDER.index(part), sampling != "t06", DATA.index(data) if data in DATA else len(DATA)


def _read(text: Path, table: Path) -> tuple[dict[Key, str], list[Figure]]:
    """Sections and figures of earlier calls."""
    if not (text.is_file() and table.is_file()):
        return {}, []
    sections: dict[Key, str] = {}
    for section in text.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        part, data, sampling = title.replace(":", ",").split(", ")
        sections[part, data, sampling] = body.strip()
    with open(table, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return sections, [(*row[:5], float(row[5])) for row in rows]  # type: ignore[misc]


def draw(path: Path, figures: Sequence[Figure]) -> None:
    """The paper's Fig. 1: acceptance and speed-up against the draft length."""
    series: dict[str, dict[str, list[float]]] = {}
    for part, data, sampling, _, name, value in figures:
        if part == "eesd":
            series.setdefault(f"{data}, {sampling}", {}).setdefault(name, []).append(value)
    gammas = list(GAMMAS)
    fig, (left, right) = figure(11.0, 4.4, 2)
    lines(left, {name: (gammas, values["accepted"]) for name, values in series.items()})
    for name, look in styles(series).items():
        left.plot(gammas, series[name]["eq5"], ls=":", lw=1, color=look.color)
    lines(right, {name: (gammas, values["speedup"]) for name, values in series.items()})
    x = "draft length (tokens)"
    tidy(left, x=x, y="accepted / proposed (simulated)", title="EESD (dotted: Eq. 5)")
    tidy(right, x=x, y="speed-up over plain decoding (times, simulated)", title="E = N/8")
    for ax in (left, right):
        legend(ax)
    path.write_bytes(as_png(fig))


def ppsd(bench: Bench, sampling: str, report: Report) -> None:
    """Measured speed-up over Eq. 6 on both profiles."""
    rows = []
    drawn = f"sampling={sampling}"
    outputs = bench.run(AR, UNIFORM, drawn, TOGETHER)["outputs"]
    for profile in (UNIFORM, EXIT_PAID):
        one = (
            "data.limit=1",
            "max_new_tokens=32",
        )  # all tokens of plain decoding take the same time
        alone, ours = bench.run(AR, profile, drawn, *one), bench.run(PPSD, profile, drawn, TOGETHER)
        measured = speedup(ours, alone)
        ratio = measured / ours["speedup_law"]
        verdict = "" if profile != UNIFORM else ("holds" if ratio >= REQUIRED else "MISSED")
        alpha = ours["acceptance_rate_verified"]
        name = profile.removeprefix("clock.profile=")
        loops = ours["loop_share"]
        report.store(
            name, alpha=alpha, eq6=ours["speedup_law"], speedup=measured, ratio=ratio, loops=loops
        )
        rows.append(
            [
                name,
                f"{alpha:.3f}",
                f"{ours['speedup_law']:.3f}",
                f"{measured:.3f}",
                f"{ratio:.3f}",
                verdict,
                f"{100 * loops:.0f} %",
                same_tokens(ours["outputs"], outputs),
            ]
        )
    heads = ["profile", "alpha", "Eq. 6", "simulated", "ratio", f"bar {REQUIRED}", "loops"]
    report.table([*heads, "as ar"], rows)


def multi(bench: Bench, sampling: str, report: Report) -> None:
    """An exit per token against each exit alone, with equal times of all steps."""
    extra = (UNIFORM, f"sampling={sampling}", TOGETHER)
    plain, rows = bench.run(AR, *extra), []
    alone = bench.run(AR, UNIFORM, f"sampling={sampling}", "data.limit=1", "max_new_tokens=32")
    for row in (PPSD, LATE, MULTI):
        summary = bench.run(row, *extra)
        measured, alpha = speedup(summary, alone), summary["acceptance_rate_verified"]
        report.store(row.name, alpha=alpha, speedup=measured, loops=summary["loop_share"])
        same = same_tokens(summary["outputs"], plain["outputs"])
        loops = f"{100 * summary['loop_share']:.0f} %"
        rows.append([row.name, f"{alpha:.3f}", f"{measured:.3f}", loops, same])
    report.table(["strategy", "alpha", "simulated", "loops", "as ar"], rows)


def eesd(bench: Bench, sampling: str, report: Report) -> None:
    """Fig. 1: overall acceptance falls with the draft length, speed-up rises and falls."""
    extra = (UNIFORM, f"sampling={sampling}", TOGETHER)
    plain = bench.run(AR, UNIFORM, f"sampling={sampling}", "data.limit=1", "max_new_tokens=32")
    rows: list[list[str]] = []
    rates: list[float] = []
    for gamma in GAMMAS:
        overrides = ("strategy=eesd", "executor=early_exit", f"executor.stages={STAGES}", EXIT)
        summary = bench.run(Row(f"eesd {gamma}", (*overrides, f"policy.gamma={gamma}")), *extra)
        alpha = summary["acceptance_rate_verified"]
        rates.append(summary["acceptance_rate"])
        report.store(
            str(gamma),
            alpha=alpha,
            accepted=rates[-1],
            eq5=eq5_acceptance(alpha, gamma),
            speedup=speedup(summary, plain),
            eq4=summary["speedup_law"],
            loops=summary["loop_share"],
        )
        rows.append(
            [
                str(gamma),
                f"{alpha:.3f}",
                f"{summary['acceptance_rate']:.3f}",
                f"{eq5_acceptance(alpha, gamma):.3f}",
                f"{speedup(summary, plain):.3f}",
                f"{summary['speedup_law']:.3f}",
            ]
        )
    heads = ["gamma", "alpha", "accepted / proposed", "Eq. 5", "simulated", "Eq. 4"]
    report.table(heads, rows)
    falls = all(a > b for a, b in pairwise(rates))
    report.say(f"Acceptance {'falls' if falls else 'DOES NOT FALL'} with the draft length.\n")


def tree(bench: Bench, sampling: str, report: Report) -> None:
    """A level of candidates per step against one token per step."""
    extra = (TOKENS_COST, f"sampling={sampling}")
    plain, rows = bench.run(AR, *extra, "data.limit=1", "max_new_tokens=32"), []
    for row in (PPSD, TREE):
        summary = bench.run(row, *extra)
        report.store(row.name, hit_rate=summary["hit_rate"], speedup=speedup(summary, plain))
        rows.append(
            [
                row.name,
                f"{summary['hit_rate']:.3f}",
                f"{summary['rows_per_target_pass']:.2f}",
                f"{summary['tbt_ms_mean']:.1f}",
                f"{speedup(summary, plain):.3f}",
            ]
        )
    report.table(["strategy", "hit rate", "tokens per step", "TBT ms", "of ar"], rows)


def same_tokens(ours: list[list[int]], plain: list[list[int]]) -> str:
    """Whether two runs gave the same outputs, in any order of the requests."""
    return "yes" if sorted(ours) == sorted(plain) else "NO"


def speedup(summary: dict[str, Any], plain: dict[str, Any]) -> float:
    """Ratio of decoding speeds."""
    return float(plain["tbt_ms_mean"] / summary["tbt_ms_mean"])


if __name__ == "__main__":
    main()
