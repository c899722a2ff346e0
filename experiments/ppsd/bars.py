"""PPSD and EESD on a simulated cluster of 8 stages, held against PPSD's Eq. 4 and 6.

    python -m experiments.ppsd.bars [--parts ppsd eesd tree] [--data humaneval gsm8k xsum]
        [--prompts 16] [--tokens 128] [--samplings t06 greedy] [--out outputs/ppsd]

ppsd: `ppsd` against `ar` where all stages cost the same (uniform_30ms), beside Eq. 6 at the run's
own alpha, and where the exit's stage pays for the exit head and its output layer
(ppsd_vicuna7b_exit). eesd: acceptance and speed-up against draft lengths 1 .. 10 (the paper's Fig.
1), beside Eq. 4 and 5. tree: `ppsd_tree` against `ppsd` on a profile in which tokens cost
(specpipe_8x3090). All rows of a part share stages and their times. Prints tables and writes them to
--out/bars.md; rows that are in --out are not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from experiments.pipelines.running import Bench, Row
from specdec.metrics.exit_laws import eq5_acceptance

STAGES = 8
EXIT = "model.exit_layer=3"
PIPELINE = ("executor=pipeline", f"executor.stages={STAGES}", EXIT)
AR = Row("ar", ("strategy=ar", *PIPELINE))
PPSD = Row("ppsd", ("strategy=ppsd", *PIPELINE))
TREE = Row("ppsd_tree", ("strategy=ppsd_tree", *PIPELINE))
GAMMAS = range(1, 11)
UNIFORM = "clock.profile=uniform_30ms"
EXIT_PAID = "clock.profile=ppsd_vicuna7b_exit"
TOKENS_COST = "clock.profile=specpipe_8x3090"
BAR = 0.95


@dataclass(slots=True)
class Report:
    """Lines for the terminal and the file alike."""

    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Prints and keeps a line."""
        print(line, flush=True)
        self.lines.append(line)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A Markdown table."""
        for cells in (heads, ["---"] * len(heads), *rows):
            self.say("| " + " | ".join(cells) + " |")
        self.say("")


Part = Callable[[Bench, str, Report], None]


def main() -> None:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts: dict[str, Part] = {"ppsd": ppsd, "eesd": eesd, "tree": tree}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--data", nargs="+", default=["humaneval", "gsm8k", "xsum"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--samplings", nargs="+", default=["t06", "greedy"])
    parser.add_argument("--out", type=Path, default=Path("outputs/ppsd"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report()
    report.say(f"Simulated time; {args.prompts} prompts x {args.tokens} tokens, {STAGES} stages.\n")
    for data in args.data:
        size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}")
        bench = Bench(common=(f"data={data}", *size), out=args.out / data)
        for sampling in args.samplings:
            for part in args.parts:
                report.say(f"## {part}: {data}, {sampling}\n")
                parts[part](bench, sampling, report)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bars.md").write_text("\n".join(report.lines) + "\n", encoding="utf-8")


def ppsd(bench: Bench, sampling: str, report: Report) -> None:
    """Measured speed-up over Eq. 6 on both profiles."""
    rows = []
    for profile in (UNIFORM, EXIT_PAID):
        extra = (profile, f"sampling={sampling}")
        plain, ours = bench.run(AR, *extra), bench.run(PPSD, *extra)
        measured = speedup(ours, plain)
        ratio = measured / ours["speedup_law"]
        held = "" if profile != UNIFORM else ("holds" if ratio >= BAR else "MISSED")
        alpha = ours["acceptance_rate_verified"]
        rows.append(
            [
                profile.removeprefix("clock.profile="),
                f"{alpha:.3f}",
                f"{ours['speedup_law']:.3f}",
                f"{measured:.3f}",
                f"{ratio:.3f}",
                held,
                f"{100 * ours['loop_share']:.0f} %",
                "yes" if ours["outputs"] == plain["outputs"] else "NO",
            ]
        )
    heads = ["profile", "alpha", "Eq. 6", "simulated", "ratio", f"bar {BAR}", "loops", "as ar"]
    report.table(heads, rows)


def eesd(bench: Bench, sampling: str, report: Report) -> None:
    """Fig. 1: overall acceptance falls with the draft length, speed-up rises and falls."""
    extra = (UNIFORM, f"sampling={sampling}")
    plain, rows, rates = bench.run(AR, *extra), [], []
    for gamma in GAMMAS:
        words = ("strategy=eesd", "executor=early_exit", f"executor.stages={STAGES}", EXIT)
        found = bench.run(Row(f"eesd {gamma}", (*words, f"policy.gamma={gamma}")), *extra)
        alpha = found["acceptance_rate_verified"]
        rates.append(found["acceptance_rate"])
        rows.append(
            [
                str(gamma),
                f"{alpha:.3f}",
                f"{found['acceptance_rate']:.3f}",
                f"{eq5_acceptance(alpha, gamma):.3f}",
                f"{speedup(found, plain):.3f}",
                f"{found['speedup_law']:.3f}",
            ]
        )
    heads = ["gamma", "alpha", "accepted / proposed", "Eq. 5", "simulated", "Eq. 4"]
    report.table(heads, rows)
    falls = all(a > b for a, b in pairwise(rates))
    report.say(f"Acceptance {'falls' if falls else 'DOES NOT FALL'} with the draft length.\n")


def tree(bench: Bench, sampling: str, report: Report) -> None:
    """Whether a level of candidates is worth its tokens."""
    extra = (TOKENS_COST, f"sampling={sampling}")
    plain, rows = bench.run(AR, *extra), []
    for row in (PPSD, TREE):
        found = bench.run(row, *extra)
        rows.append(
            [
                row.name,
                f"{found['hit_rate']:.3f}",
                f"{found['rows_per_target_pass']:.2f}",
                f"{found['tbt_ms_mean']:.1f}",
                f"{speedup(found, plain):.3f}",
            ]
        )
    report.table(["strategy", "hit rate", "tokens per step", "TBT ms", "of ar"], rows)


def speedup(found: dict[str, Any], plain: dict[str, Any]) -> float:
    """Ratio of decoding speeds."""
    return float(plain["tbt_ms_mean"] / found["tbt_ms_mean"])


if __name__ == "__main__":
    main()
