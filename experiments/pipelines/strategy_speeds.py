"""Pipelined strategies on a simulated cluster, and the times that their counts imply.

    python -m experiments.pipelines.strategy_speeds [--parts main pipedec crossing] [--prompts 16]
        [--tokens 128] [--samplings t06 greedy] [--out outputs/pipelines]

main: ar, SpecInfer (drafting serial, ahead by rule, hidden), SpecPipe, SpecPipe with two levels
per step and best first, all at 64 nodes per step, 8 stages, profile specpipe_8x3090, HumanEval.
pipedec: PipeDec and ar at 7, 14 and 21 stages. crossing: synthetic drafts of rising quality, until
a SpecInfer with hidden drafting overtakes SpecPipe. Existing runs in --out are reused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments.pipelines.theory import (
    crossing,
    decode_counts,
    implied_tbt_ms,
    needed_acceptance_length,
)
from experiments.reproduce.lab import Lab, Outcome
from specdec.clocks.build import build_profile
from specdec.profiling.trees import eq2_tbt


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy.

    Attributes:
        beside, between_hit, between_miss: draft passes, see ``decode_counts``.
    """

    name: str
    overrides: tuple[str, ...]
    beside: int = 0
    between_hit: float = 0.0
    between_miss: float = 0.0

    def implied_ms(self, run: Outcome) -> float:
        """The time between tokens by the counts of a run and its profile."""
        draft = {"between_hit": self.between_hit, "between_miss": self.between_miss}
        counts = decode_counts(run.results, run.totals, beside=self.beside, **draft)
        return implied_tbt_ms(counts, build_profile(run.config["clock"]))


STAGES = 8
PIPELINE = ("executor=pipeline", f"executor.stages={STAGES}", "clock.profile=specpipe_8x3090")
DEPTH = 8  # levels of SpecInfer's tree, one draft pass each
SPECINFER = ("strategy=specinfer", *PIPELINE)
SPECPIPE = Row("specpipe", ("strategy=specpipe", *PIPELINE), beside=1)
WIDER = ("policy.levels_per_step=2", "policy.width=32")
HIDDEN = Row("specinfer hidden", (*SPECINFER, "policy.draft_overlap=full"))
SERIAL = Row("specinfer serial", SPECINFER, between_hit=DEPTH, between_miss=DEPTH)
# Ahead by rule: one pass per step, the first for the leaves.
BY_RULE = {"between_hit": max(0, DEPTH + 1 - STAGES), "between_miss": DEPTH}
BEST_FIRST = Row("specpipe_bf", ("strategy=specpipe_bf", *PIPELINE), beside=2)
ROWS = (
    Row("ar", ("strategy=ar", *PIPELINE)),
    SERIAL,
    Row("specinfer ahead", (*SPECINFER, "policy.draft_overlap=rule"), **BY_RULE),
    HIDDEN,
    SPECPIPE,
    Row("specpipe 2 levels", (*SPECPIPE.overrides, *WIDER), beside=2),
    Row("specpipe_bf 1 pass", (*BEST_FIRST.overrides, "policy.draft_passes=1"), beside=1),
    BEST_FIRST,
)
EASY_SHARES = (0.05, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"main": main_table, "pipedec": pipedec, "crossing": overtaking}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--samplings", nargs="+", default=["t06", "greedy"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--out", type=Path, default=Path("outputs/pipelines"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}")
    print(f"simulated time; {args.prompts} prompts x {args.tokens} tokens")
    for part in args.parts:
        model = "synthetic" if part == "crossing" else args.model
        common = ("clock=simulated", "data=humaneval", f"model={model}", *size)
        samplings = args.samplings[:1] if part == "crossing" else args.samplings
        for sampling in samplings:
            print(f"\n{part}, {sampling}")
            parts[part](Lab(folder=args.out, quick=False), (*common, f"sampling={sampling}"))


def table(lab: Lab, common: Sequence[str], rows: Sequence[Row]) -> dict[str, Outcome]:
    """Runs the rows and prints their figures, each over the first row's."""
    runs = {row.name: lab.run([*common, *row.overrides]) for row in rows}
    first = next(iter(runs.values()))
    shown: dict[str, dict[str, Any]] = {}
    for row in rows:
        run, s = runs[row.name], runs[row.name].summary
        shown[row.name] = {
            "steps/token": s["steps_per_token"],
            "of ar": first.summary["steps_per_token"] / s["steps_per_token"],
            "TBT ms": run.tbt_ms,
            "implied ms": row.implied_ms(run),
            "hit rate": s["hit_rate"],
            "accept": s["acceptance_length"],
            "rows": s["rows_per_target_pass"],
            "draft/token": s["draft_passes_per_token"],
            "loops": s["loop_share"],
            "as ar": [r.output for r in run.results] == [r.output for r in first.results],
        }
    print(pd.DataFrame(shown).T.infer_objects().to_string(float_format="%.3f", na_rep="-"))
    return runs


def main_table(lab: Lab, common: Sequence[str]) -> None:
    runs = table(lab, common, ROWS)
    specpipe, hidden = runs["specpipe"], runs[HIDDEN.name]
    nodes, length = (hidden.summary[k] for k in ("rows_per_target_pass", "acceptance_length"))
    profile = build_profile(specpipe.config["clock"])
    needed = needed_acceptance_length(specpipe.tbt_ms, nodes, STAGES, profile)
    print(f"specinfer hidden needs {needed:.2f} tokens per tree to overtake, it has {length:.2f}")
    s = specpipe.summary
    print(
        f"Eq. 2 at specpipe's hit rate: {eq2_tbt(1.0, STAGES, s['hit_rate']):.2f} steps per token;"
        f" {s['flush_steps']} flush and {s['refill_steps']} refill steps"
    )


def pipedec(lab: Lab, common: Sequence[str]) -> None:
    """PipeDec at the paper's three depths, each against plain decoding at that depth."""
    for stages in (7, 14, 21):
        where = ("executor=pipedec", f"executor.stages={stages}", f"clock.profile=pipedec_{stages}")
        print(f"{stages} stages")
        ours = Row("pipedec", ("strategy=pipedec", *where), beside=1)
        table(lab, common, (Row("ar", ("strategy=ar", *where)), ours))


def overtaking(lab: Lab, common: Sequence[str]) -> None:
    """The hit rate at which SpecInfer with hidden drafting overtakes SpecPipe.

    Synthetic drafts; easy is the share of positions whose first candidate is right to 0.95.
    """
    rows = []
    for easy in EASY_SHARES:
        rest = (1.0 - easy) / 2
        law = f"model.weights=[{easy},{rest:.3f},{rest:.3f}]"
        pipe, *trees = (lab.run([*common, *r.overrides, law]) for r in (SPECPIPE, HIDDEN, SERIAL))
        lengths = (pipe.summary["hit_rate"], trees[0].summary["acceptance_length"])
        rows.append((easy, *lengths, pipe.tbt_ms, *(run.tbt_ms for run in trees)))
    columns = ["easy", "hit rate", "accept", "specpipe ms", "hidden ms", "serial ms"]
    found = pd.DataFrame(rows, columns=columns)
    print(found.to_string(index=False, float_format="%.3f"))
    for name in ("hidden", "serial"):
        at = crossing(found["hit rate"], found[f"{name} ms"] - found["specpipe ms"])
        where = "nowhere in this range" if at is None else f"from a hit rate of {at:.3f} on"
        print(f"specinfer with its drafting {name} overtakes specpipe {where}")


if __name__ == "__main__":
    main()
