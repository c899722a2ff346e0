"""Pipelined strategies on a simulated cluster, checked against required speeds.

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
from pathlib import Path
from typing import Any

import torch

from experiments.pipelines.simulated_runs import Bench, Row, print_check
from experiments.pipelines.theory import crossing, needed_acceptance_length
from specdec.clocks.build import build_profile
from specdec.config.job import run_job_of
from specdec.profiling.trees import eq2_tbt

STAGES = 8
PROFILE = "clock.profile=specpipe_8x3090"
PIPELINE = ("executor=pipeline", f"executor.stages={STAGES}", PROFILE)
DEPTH = 8  # levels of SpecInfer's tree, one draft pass each
SPECINFER = ("strategy=specinfer", *PIPELINE)
SPECPIPE = Row("specpipe", ("strategy=specpipe", *PIPELINE), beside=1)
HIDDEN = Row("specinfer hidden", (*SPECINFER, "policy.draft_overlap=full"))
SERIAL = Row("specinfer serial", SPECINFER, between_hit=DEPTH, between_miss=DEPTH)
BEST_FIRST = Row("specpipe_bf", ("strategy=specpipe_bf", *PIPELINE), beside=2)
ROWS = (
    Row("ar", ("strategy=ar", *PIPELINE)),
    SERIAL,
    Row(
        "specinfer ahead",
        (*SPECINFER, "policy.draft_overlap=rule"),
        between_hit=max(0, DEPTH + 1 - STAGES),  # one pass per step, the first for the leaves
        between_miss=DEPTH,
    ),
    HIDDEN,
    SPECPIPE,
    Row(
        "specpipe 2 levels",
        (*SPECPIPE.overrides, "policy.levels_per_step=2", "policy.width=32"),
        beside=2,
    ),
    Row("specpipe_bf 1 pass", (*BEST_FIRST.overrides, "policy.draft_passes=1"), beside=1),
    BEST_FIRST,
)
HEAD = f"{'':20} {'steps/token':>11} {'of ar':>6} {'TBT ms':>7} {'implied':>8} {'off':>6}"
EASY_SHARES = (0.05, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9)


def main() -> None:
    """Runs the selected parts and prints their tables."""
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
        common = ("data=humaneval", f"model={model}", *size)
        parts[part](Bench(common=common, out=args.out / part), args.samplings)


def main_table(bench: Bench, samplings: Sequence[str]) -> None:
    """A table per sampling and a line per requirement."""
    saved = []
    for sampling in samplings:
        summaries = _table(bench, ROWS, f"sampling={sampling}")
        ar, specpipe, best = (summaries[name] for name in ("ar", "specpipe", "specpipe_bf"))
        ratio = _ratio(ar, specpipe)
        print_check(
            f"specpipe over ar in steps per token: {ratio:.2f}x", ratio >= 3.5, "3.5x (t06)"
        )
        serial, hidden = summaries[SERIAL.name], summaries[HIDDEN.name]
        faster = specpipe["tbt_ms_mean"] <= serial["tbt_ms_mean"]
        print_check("specpipe's TBT against specinfer's, drafting serial", faster, "no slower")
        _print_needed_length(specpipe, hidden)
        saved.append(1.0 - best["steps_per_token"] / specpipe["steps_per_token"])
        by_law = eq2_tbt(1.0, STAGES, specpipe["hit_rate"])
        print(
            f"  specpipe's Eq. 2 at its hit rate of {specpipe['hit_rate']:.3f}: {by_law:.2f} steps"
            f" per token, simulated {specpipe['steps_per_token']:.2f};"
            f" {specpipe['flush_steps']} flush and {specpipe['refill_steps']} refill steps\n"
        )
    mean = sum(saved) / len(saved)
    each = ", ".join(f"{part:.1%}" for part in saved)
    print_check(
        f"specpipe_bf saves {mean:.1%} of specpipe's steps ({each})", mean >= 0.1, "10 % of them"
    )


def pipedec(bench: Bench, samplings: Sequence[str]) -> None:
    """PipeDec at the paper's three depths, each against plain decoding at that depth."""
    for stages in (7, 14, 21):
        where = ("executor=pipedec", f"executor.stages={stages}", f"clock.profile=pipedec_{stages}")
        rows = (
            Row("ar", ("strategy=ar", *where)),
            Row("pipedec", ("strategy=pipedec", *where), beside=1),
        )
        for sampling in samplings:
            print(f"{stages} stages:", end=" ")
            summaries = _table(bench, rows, f"sampling={sampling}")
            ratio = _ratio(*summaries.values())
            print(f"  pipedec over ar in steps per token: {ratio:.2f}x\n")


def overtaking(bench: Bench, _: Sequence[str]) -> None:
    """The hit rate at which SpecInfer with hidden drafting overtakes SpecPipe."""
    print("synthetic drafts; easy: share of positions whose first candidate is right to 0.95")
    print(f"{'easy':>6} {'hit rate':>9} {'accept':>9} {'specpipe':>9} {'hidden':>8} {'serial':>8}")
    hits, lead, serial_lead = [], [], []
    for easy in EASY_SHARES:
        rest = (1.0 - easy) / 2
        law = f"model.weights=[{easy},{rest:.3f},{rest:.3f}]"
        pipe, hidden, serial = (bench.run(row, law) for row in (SPECPIPE, HIDDEN, SERIAL))
        times = [summary["tbt_ms_mean"] for summary in (pipe, hidden, serial)]
        hits.append(pipe["hit_rate"])
        lead.append(times[1] - times[0])
        serial_lead.append(times[2] - times[0])
        print(
            f"{easy:6.2f} {pipe['hit_rate']:9.3f} {hidden['acceptance_length']:9.2f}"
            f" {times[0]:9.1f} {times[1]:8.1f} {times[2]:8.1f}"
        )
    for name, leads in (("hidden", lead), ("serial", serial_lead)):
        at = crossing(hits, leads)
        where = "nowhere in this range" if at is None else f"from a hit rate of {at:.3f} on"
        print(f"  specinfer with its drafting {name} overtakes specpipe {where}")
    print()


def _table(bench: Bench, rows: Sequence[Row], sampling: str) -> dict[str, dict[str, Any]]:
    summaries: dict[str, dict[str, Any]] = {}
    print(sampling)
    print(f"{HEAD} {'hit':>6} {'accept':>7} {'rows':>6} {'draft/t':>8} {'loops':>6}  tokens")
    worst = 0.0
    for row in rows:
        summaries[row.name] = s = bench.run(row, sampling)
        off = s["tbt_ms_mean"] / s["implied_tbt_ms"] - 1.0
        worst = max(worst, abs(off))
        plain = next(iter(summaries.values()))
        same = "as ar" if s["outputs"] == plain["outputs"] else "DIFFER"
        print(
            f"{row.name:20} {s['steps_per_token']:11.3f} {_ratio(plain, s):5.2f}x"
            f" {s['tbt_ms_mean']:7.1f} {s['implied_tbt_ms']:8.1f} {off:6.1%}"
            f" {_known(s['hit_rate']):>6} {_known(s['acceptance_length']):>7}"
            f" {s['rows_per_target_pass']:6.1f} {s['draft_passes_per_token']:8.2f}"
            f" {s['loop_share']:6.1%}  {same}",
            flush=True,
        )
    print_check(f"TBT against counts and profile: {worst:.1%} off at most", worst <= 0.05, "5 %")
    return summaries


def _print_needed_length(specpipe: dict[str, Any], hidden: dict[str, Any]) -> None:
    config = run_job_of(["clock=simulated", "model=random", *SPECPIPE.overrides]).config
    profile = build_profile(config["clock"])
    rows, length = hidden["rows_per_target_pass"], hidden["acceptance_length"]
    needed = needed_acceptance_length(specpipe["tbt_ms_mean"], rows, STAGES, profile)
    print(
        f"  specinfer with its drafting hidden needs {needed:.2f} tokens per tree to overtake"
        f" specpipe here; it has {length:.2f}"
    )


def _ratio(ar: dict[str, Any], other: dict[str, Any]) -> float:
    return float(ar["steps_per_token"] / other["steps_per_token"])


def _known(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
