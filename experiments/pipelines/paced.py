"""Strategies on real ranks with a paced clock, compared with the simulator's times.

    python -m experiments.pipelines.paced [--strategies specpipe specinfer ar] [--scale 2]
        [--prompts 4] [--tokens 64] [--samplings t06] [--words WORD ...] [--out outputs/paced]
    python -m experiments.pipelines.paced --strategies ppsd --words clock.profile=ppsd_vicuna7b_exit

Each strategy runs twice on one profile: simulated in one process, paced on a rank per device. Those
of ``GROUPS`` have two groups of devices and the profiles named there, all others 8 stages and
specpipe_8x3090; ``--words`` has further overrides. Tokens, passes, hits and unused nodes must be
the same; prints the difference of the times and the share of overruns. ``clock.scale`` stretches
the profile, so that this machine computes each pass within its time. A row takes its
TBT x tokens x scale; the machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from specdec.config.job import run_job_of
from specdec.files import write_json
from specdec.metrics import RequestResult, summarise
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt

PIPELINE = ("executor=pipeline", "executor.stages=8", "clock.profile=specpipe_8x3090")
TABLE6 = ("clock.profile=swiftspec_table6",)
SWIFTSPEC = ("strategy=swiftspec", "policy.d=ratio")
GROUPS = {
    **{name: (f"strategy={name}", *TABLE6) for name in ("pearl", "ssd", "amusd")},
    "swiftspec": (*SWIFTSPEC, *TABLE6, *(f"executor.{g}_degree=null" for g in ("target", "draft"))),
    "swiftspec_2x2": (
        *(*SWIFTSPEC, "clock.profile=swiftspec_table1"),
        *(f"executor.{group}_degree=2" for group in ("target", "draft")),
    ),
}
KINDS = {"simulated": "in_process", "paced": "distributed"}
WARM_UP_STEPS = 24
SAME = (
    *("outputs", "steps", "hit_rate", "target_passes", "target_rows", "draft_passes"),
    "wasted_nodes",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=["specpipe", "specinfer", "ar"])
    parser.add_argument("--scale", type=float, default=2.0)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samplings", nargs="+", default=["t06"])
    parser.add_argument("--words", nargs="+", default=[], help="such as clock.profile=NAME")
    parser.add_argument("--out", type=Path, default=Path("outputs/paced"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}", "threads=1")
    print(
        f"paced against simulated; clock.scale={args.scale:g}, {args.prompts} prompts x"
        f" {args.tokens} tokens {' '.join(args.words)}"
    )
    for name, sampling in product(args.strategies, args.samplings):
        chosen = GROUPS.get(name, (f"strategy={name}", *PIPELINE))
        common = (*chosen, f"sampling={sampling}", "data=humaneval", *size, *args.words)
        overrides = (*common, f"clock.scale={args.scale}")
        summaries = {kind: run(kind, overrides) for kind in KINDS}
        write_json(args.out / f"{name}-{sampling}.json", summaries)
        report(f"{name} {sampling}", args.scale, **summaries)


def run(kind: str, overrides: Sequence[str]) -> dict[str, Any]:
    """One strategy's summary on one clock, with ``outputs``, after a warm-up of a few steps."""
    config = run_job_of([f"clock={kind}", f"executor.transport={KINDS[kind]}", *overrides]).config
    pair, prompts, _ = prepare(config)
    runner = PartsRunner(cfg=config, pair=pair, stop=stop_rules(config, pair))
    results: list[RequestResult] = []
    try:
        if kind == "paced":
            _warm_up(runner, prompts)
        totals = runner.run(prompts, results.append)
    finally:
        runner.close()
    summary = summarise(results, totals)
    summary["outputs"] = [list(result.output) for result in results]
    return summary


def report(name: str, scale: float, simulated: dict[str, Any], paced: dict[str, Any]) -> None:
    """Prints one strategy's line, and the counts that differ although they must be equal."""
    tbt = [summary["tbt_ms_mean"] / scale for summary in (simulated, paced)]
    share, off = paced["overrun_share"], tbt[1] / tbt[0] - 1.0
    holds = abs(off) <= 0.1 and share < 0.02
    different = [key for key in SAME if simulated[key] != paced[key]]
    equality = (
        f"DIFFER in {', '.join(different)}" if different else "same tokens, hits, steps, rows"
    )
    print(
        f"{'ok  ' if holds and not different else 'MISS'} {name:16} TBT / scale: simulated"
        f" {tbt[0]:.1f} ms, paced {tbt[1]:.1f} ms ({off:+.1%}; bar: 10 %), overruns {share:.2%}"
        f" (bar: 2 %), loop_share {paced['loop_share']:.1%}; {equality}",
        flush=True,
    )


def _warm_up(runner: PartsRunner, prompts: Sequence[TokenPrompt]) -> None:
    """Decodes the first steps of one prompt and cancels it."""
    state = runner.parts.new_state()
    with torch.inference_mode():
        for number, _ in enumerate(runner.steps(state, prompts[:1], lambda _: None)):
            if number == WARM_UP_STEPS:
                for request in state.requests.values():
                    request.cancel()


if __name__ == "__main__":
    main()
