"""Draft passes and time that staging saves, with the same trees (Staged, 3.2).

    python -m experiments.benchmarks.staged [overrides of `specdec run`]

For chain(8), the static trees 2,2,1,1 and 1,1,3,1,1,1 and a best-first tree: draft passes of the
draft alone and of the staged source, whether every submitted tree was the same, and the ratio of
wall times (medians over interleaved repeats). Defaults: data=stdlib, 8 prompts x 64 tokens,
sampling=no_repeat4.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import deepcopy
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from specdec.config.job import run_job_of
from specdec.metrics import RequestResult
from specdec.pairs import ModelPair
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.types import Nodes

REPEATS = 5
DEFAULTS = ["data=stdlib", "data.limit=8", "max_new_tokens=64", "sampling=no_repeat4"]
TREES = {
    "chain(8)": ["policy=chain", "policy.gamma=8"],
    "static 2,2,1,1": ["policy=staged"],
    "static 1,1,3,1,1,1": ["policy=static", "policy.branching=[1,1,3,1,1,1]"],
    "best first 32/4/6": ["policy=best_first"],
}


def main() -> None:
    torch.set_num_threads(1)
    overrides = [*DEFAULTS, *sys.argv[1:]]
    cfg = run_job_of(["strategy=staged", *overrides]).config
    pair, prompts, _ = prepare(cfg)
    print(f"{'tree':22} {'draft passes':>24} {'saved':>7} {'same trees':>11} {'time ratio':>11}")
    for name, policy in TREES.items():
        compare(name, [*overrides, *policy], pair, prompts)


def compare(
    name: str, overrides: Sequence[str], pair: ModelPair, prompts: Sequence[TokenPrompt]
) -> None:
    """One tree: the draft alone against the staged source."""
    runners = []
    for source in ("draft_model", "staged"):
        cfg = deepcopy(run_job_of(["strategy=staged", *overrides, f"source={source}"]).config)
        runners.append(PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair)))
    same = trees_of(runners[0], prompts) == trees_of(runners[1], prompts)
    seconds: list[list[float]] = [[], []]
    passes = [0, 0]
    for _ in range(REPEATS):
        for i, runner in enumerate(runners):
            results: list[RequestResult] = []
            totals = runner.run(prompts, results.append)
            seconds[i].append(totals.wall_s)
            passes[i] = totals.draft_passes
    ratio = median(b / a for a, b in zip(*seconds, strict=True))
    saved = 1 - passes[1] / passes[0]
    print(
        f"{name:22} {passes[0]:>10} -> {passes[1]:>10} {saved:>7.1%} {same!s:>11} {ratio:>10.3f}x"
    )


def trees_of(runner: PartsRunner, prompts: Sequence[TokenPrompt]) -> list[tuple[Any, ...]]:
    """Tokens and parents of every submitted tree of one run (which also warms up)."""
    policy, trees = runner.parts.policy, list[tuple[Any, ...]]()
    select = policy.select

    def recorded(state: Any, source: Any) -> Nodes:
        nodes = select(state, source)
        for request_id, ids in nodes.items:
            tree = state.requests[request_id].tree
            slots = tree.slots(ids)
            trees.append((request_id, tree.tokens[slots].tolist(), tree.parents[slots].tolist()))
        return nodes

    with patch.object(policy, "select", recorded):
        runner.run(prompts, lambda _: None)
    return trees


if __name__ == "__main__":
    main()
