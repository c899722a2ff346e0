"""Parallel against serial SwiftSpec on simulated device groups, and the paper's figures.

    python -m experiments.swiftspec.parallel_against_serial [--data humaneval gsm8k mt_bench]
        [--prompts 8] [--tokens 96] [--samplings greedy] [--out outputs/swiftspec]

Table 6's times: target 10.48 ms on 6 devices and draft 3.25 ms on 2 (`swiftspec`), 10.34 and 3.73
ms on all 8 (`swiftspec_base`); bs = w = 8. Per data set: the parallel form with d of the times'
ratio, one more, and until the target is ready; the serial form at several d and w. Each row has its
tokens per second beside those implied by its own counts:

    acceptance length / (max(t_target, d t_draft) + g t_draft),   g serial expansions per round,

with the acceptance length after each request's first answer, from which tokens per second are
counted. Existing runs in --out are reused.
"""

from __future__ import annotations

import argparse
from math import ceil
from pathlib import Path
from typing import Any

import torch

from experiments.pipelines.simulated_runs import Bench, Row, print_check
from specdec.clocks import Work
from specdec.clocks.build import build_profile
from specdec.config.job import run_job_of

PAPER_SPEEDUP = 1.37
PAPER_LOSS = (0.08, 0.09)
SIZE = 8  # bs and w
PROFILE = "clock.profile=swiftspec_table6"
PARALLEL = {
    name: Row(f"swiftspec d={name}", ("strategy=swiftspec", PROFILE, f"policy.d={d}"))
    for name, d in (("3", 3), ("4", 4), ("ready", "until_ready"))
}
SERIAL = {
    (d, w): Row(
        f"base d={d} w={w}",
        ("strategy=swiftspec_base", PROFILE, f"policy.d={d}", f"policy.w={w}"),
    )
    for d, w in ((1, 8), (2, 8), (3, 8), (4, 8), (5, 8), (2, 2), (3, 2), (4, 2))
}
HEAD = f"{'':18} {'tokens/s':>9} {'implied':>8} {'off':>6} {'accept':>7} {'g':>5} {'loops':>6}"


def main() -> None:
    """Runs the rows and prints a table per data set and sampling, then the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["humaneval", "gsm8k", "mt_bench"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--samplings", nargs="+", default=["greedy"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--out", type=Path, default=Path("outputs/swiftspec"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"simulated time; {args.prompts} prompts x {args.tokens} tokens; bs = {SIZE}")
    size = (f"model={args.model}", f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}")
    ratios, losses = [], []
    for data in args.data:
        bench = Bench(common=(f"data={data}", *size), out=args.out / data)
        for sampling in args.samplings:
            ratio, loss = table(bench, f"{data}, {sampling}", f"sampling={sampling}")
            ratios.append(ratio)
            losses.append(loss)
    mean = sum(ratios) / len(ratios)
    print(f"swiftspec over swiftspec_base, mean: {mean:.2f}x (paper: {PAPER_SPEEDUP}x)")
    lost = sum(losses) / len(losses)
    low, high = PAPER_LOSS
    print(f"loss of acceptance length, mean: {lost:.1%} (paper: {low:.0%} to {high:.0%})")


def table(bench: Bench, title: str, sampling: str) -> tuple[float, float]:
    """One table; returns the speed-up over the serial form and the loss of acceptance length."""
    print(f"\n{title}\n{HEAD}")
    parallel = {key: _row(bench, row, sampling) for key, row in PARALLEL.items()}
    serial = {key: _row(bench, row, sampling) for key, row in SERIAL.items()}
    summaries = [*parallel.values(), *serial.values()]
    worst = max(abs(s["tokens_per_s"] / s["implied"] - 1.0) for s in summaries)
    print_check(
        f"tokens/s against counts and profile: {worst:.1%} off at most", worst <= 0.05, "5 %"
    )
    outputs = {str(s["outputs"]) for s in summaries}
    print_check(f"{len(summaries)} rows gave {len(outputs)} output(s)", len(outputs) == 1, "one")
    best = max(parallel.values(), key=_speed)
    base_key = max(serial, key=lambda key: _speed(serial[key]))
    ratio = _speed(best) / _speed(serial[base_key])
    loss = 1.0 - parallel["3"]["acceptance_length"] / serial[3, SIZE]["acceptance_length"]
    print(
        f"  swiftspec over swiftspec_base (its best: d={base_key[0]}, w={base_key[1]}):"
        f" {ratio:.2f}x; acceptance length lost at d = 3, w = bs = 8: {loss:.1%}"
    )
    return ratio, loss


def _row(bench: Bench, row: Row, sampling: str) -> dict[str, Any]:
    summary = bench.run(row, sampling)
    config = run_job_of(["clock=simulated", "model=random", *row.overrides]).config
    between, summary["implied"] = implied_speed(summary, config)
    off = summary["tokens_per_s"] / summary["implied"] - 1.0
    print(
        f"{row.name:18} {summary['tokens_per_s']:9.1f} {summary['implied']:8.1f} {off:6.1%}"
        f" {summary['acceptance_length']:7.3f} {between:5.2f} {summary['loop_share']:6.1%}",
        flush=True,
    )
    return summary


def implied_speed(summary: dict[str, Any], config: dict[str, Any]) -> tuple[float, float]:
    """g, and tokens/s by the formula above, from a run's own counts and its profile.

    Args:
        summary: the run's summary, with ``expansions`` and the counts of the decode phase.
        config: the run's configuration.
    """
    profile, policy = build_profile(config["clock"]), config["policy"]
    target, draft = profile.ms(Work.STAGE, policy["bs"]), profile.ms(Work.DRAFT, policy["w"])
    beside = 0
    if policy["asynchronous"]:  # until_ready: the last expansion ends when the target has
        beside = policy["d"] if isinstance(policy["d"], int) else ceil(target / draft)
    between = summary["expansions"]["between"] / summary["target_passes"]
    round_ms = max(target, beside * draft) + between * draft
    return between, 1e3 * summary["decode_tokens"] / summary["decode_answers"] / round_ms


def _speed(summary: dict[str, Any]) -> float:
    return float(summary["tokens_per_s"])


if __name__ == "__main__":
    main()
