"""SwiftSpec on real ranks, paced, against the simulator: same configuration, same tokens.

    python -m experiments.swiftspec.paced [--layouts 1x1 2x2] [--scale 10] [--prompts 2]
        [--tokens 48] [--model tiny]

1x1 (target x draft devices) takes the times of swiftspec_table6, 2x2 those of swiftspec_table1 on
two devices each. --scale stretches them so that this machine's own work fits; a run with more than
2 % overruns does not count.
"""

from __future__ import annotations

import argparse

import torch

from experiments.pipelines.paced import KINDS, run

LAYOUTS = {
    "1x1": (
        "clock.profile=swiftspec_table6",
        "executor.target_degree=null",
        "executor.draft_degree=null",
    ),
    "2x2": (
        "clock.profile=swiftspec_table1",
        "executor.target_degree=2",
        "executor.draft_degree=2",
    ),
}
ALLOWED = 0.1


def main() -> None:
    """Runs each layout on both clocks and prints a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", default="tiny")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = [f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}", "threads=1"]
    common = ["strategy=swiftspec", "data=humaneval", f"model={args.model}", *size]
    for name in args.layouts:
        overrides = [*common, *LAYOUTS[name], f"clock.scale={args.scale}", "policy.d=ratio"]
        simulated, paced = (run(kind, overrides) for kind in KINDS)
        same = "same tokens" if simulated["outputs"] == paced["outputs"] else "TOKENS DIFFER"
        off = paced["tokens_per_s"] / simulated["tokens_per_s"] - 1.0
        holds = abs(off) <= ALLOWED and paced["overrun_share"] <= 0.02
        print(
            f"{'ok  ' if holds else 'MISS'} {name}: paced {paced['tokens_per_s']:.2f} tokens/s,"
            f" simulated {simulated['tokens_per_s']:.2f}, {off:+.1%} (bar: 10 %);"
            f" overruns {paced['overrun_share']:.1%}; scale {args.scale:g}; {same}",
            flush=True,
        )


if __name__ == "__main__":
    main()
