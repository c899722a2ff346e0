"""CPU time of the controller per verification, for every asynchronous strategy and serial ones.

    python -m experiments.benchmarks.controller

Decodes a synthetic pair (no model is computed) on the simulated clock, in this thread. What is left
is the loop, the policy, trees, verification, commits, and the simulated clock, which real runs do
without. Prints and stores CPU microseconds per answer of the target and per token; medians of
``--repeats``. CPU time of one thread, so other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import thread_time

import torch

from specdec.api import Decoder
from specdec.files import write_json

RESULT = Path(__file__).with_name("results") / "controller.json"
ONE_TARGET = ("ar", "speculative", "best_first", "pearl", "ssd", "amusd", "pipespec", "swiftspec")
PIPELINE = ("pipeinfer", "flowspec", "specpipe", "specpipe_bf")
EXTRA = {"pipespec": ("model.middle_top1=[0.9,0.95,0.97]",)}
PROFILES = {
    **dict.fromkeys((*ONE_TARGET, "dsi"), "pipespec_70b"),
    **dict.fromkeys(PIPELINE, "specpipe_8x3090"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, profile in PROFILES.items():
        words = [f"strategy={name}", "model=synthetic", "clock=simulated"]
        words += [f"clock.profile={profile}", f"max_new_tokens={args.tokens}", *EXTRA.get(name, ())]
        runs = [decode(words, args.prompts) for _ in range(args.repeats + 1)][1:]  # first: warm-up
        us, answers, tokens = 1e6 * median(run[0] for run in runs), *runs[0][1:]
        row = {"strategy": name, "us_per_answer": us / answers, "us_per_token": us / tokens}
        rows.append({**row, "answers_per_token": answers / tokens})
        print(rows[-1], flush=True)
    write_json(RESULT, {"prompts": args.prompts, "tokens": args.tokens, "rows": rows})


def decode(words: list[str], num_prompts: int) -> tuple[float, int, int]:
    """(CPU seconds, answers of the target, tokens) of one run."""
    with Decoder(words) as decoder:
        start = thread_time()
        found = [decoder.generate([1, 2, 3, 4], prompt_id=i) for i in range(num_prompts)]
        seconds = thread_time() - start
    answers = sum(f.metrics["answers"] for f in found)
    return seconds, int(answers), sum(len(f.tokens) for f in found)


if __name__ == "__main__":
    main()
