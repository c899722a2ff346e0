"""Memory, messages and host time of strategies on a pair of ``experiments.scale.checkpoints``.

    python -m experiments.scale.measure FOLDER --strategies best_first --samplings t06 [options]

Every row runs in a separate process, so that its peak memory is measured alone, and is appended to
``--out`` as a line of JSON; rows that are there already are skipped. Combinations that the library
refuses are rows with the reason. Columns:

- ``load_s``: seconds to compose the strategy, models included.
- ``peak_mb``, ``weights_mb``, ``cache_mb``: largest resident memory of the process, what the
  weights of the models that the row loads take, and the target's cache; the rest is Python, torch,
  activations and logits.
- ``rank_peak_mb``: largest resident memory of a process with target layers, with ``--stages``.
- ``host_ms``: CPU milliseconds per step of the controller's thread outside model calls.
- ``overhead``: that time as a share of the run's wall time here.
- ``share_of_12_ms``: what that would be of a step whose target pass takes 12 ms, if nothing
  overlapped.
- ``bytes_per_step``: sent between ranks, with ``--stages`` above 1 (one process per stage).
- ``accepted_per_pass``: tokens per answer of the target; a pipeline answers one level at a time.
- ``loop_share``: as in every table of the library.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

from specdec.config.hydra import compose_config
from specdec.errors import UserError
from specdec.metrics import RequestResult
from specdec.metrics.loops import loop_share
from specdec.models.runner import ModelRunner
from specdec.pairs import build_pair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

SAMPLINGS = {
    "greedy": ["sampling=greedy"],
    "t06": ["sampling=t06"],
    "top_p": ["sampling=t08"],
    "rejection": ["sampling=t06", "verifier=rejection"],
}
STRATEGIES = ("ar", "speculative", "best_first", "specpipe", "specpipe_db", "swiftspec", "ppsd")
WITHOUT_DRAFT = ("ar", "ppsd")
_TARGET_MS = 12.0
_WARM_UP = 16  # tokens of a prompt that is decoded before, since first calls allocate
_MB = 1e6


class ModelTime:
    """CPU seconds of this thread in passes of models while installed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        original = ModelRunner.forward

        def forward(runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
            start = thread_time()
            try:
                return original(runner, *args, **kwargs)
            finally:
                self.seconds += thread_time() - start

        ModelRunner.forward = forward  # type: ignore[method-assign]


def overrides(args: argparse.Namespace, strategy: str, sampling: str) -> list[str]:
    chosen = [f"strategy={strategy}", "model=hf", *SAMPLINGS[sampling]]
    chosen += [f"model.{name}={args.folder / name}" for name in ("target", "draft")]
    chosen += [f"model.dtype={args.dtype}", f"max_new_tokens={args.tokens}"]
    if strategy.startswith("specpipe"):
        chosen.append(f"executor.stages={max(args.stages, 2)}")
    elif strategy == "swiftspec":
        chosen += [f"executor.target_degree={max(args.stages, 2)}", "executor.draft_degree=1"]
    elif strategy == "ppsd":  # its exit agrees with the target as the draft does
        facts = json.loads((args.folder / "pair.json").read_text(encoding="utf-8"))
        chosen.append(f"model.exit_layer={facts['draft_layers']}")
    elif args.stages > 1:
        chosen += ["executor=pipeline", f"executor.stages={args.stages}"]
    if args.stages > 1:
        chosen.append("executor.transport=distributed")
    return chosen


def run_row(args: argparse.Namespace, strategy: str, sampling: str) -> dict[str, Any]:
    """Decodes one prompt of random tokens and returns the row."""
    torch.set_num_threads(1)
    start, model_time = perf_counter(), ModelTime()
    cfg = compose_config(overrides(args, strategy, sampling)).values
    pair = build_pair(cfg["model"])
    vars(pair)["tokenizer"] = None  # these checkpoints have none, and texts are not read
    runner = PartsRunner(cfg=cfg, pair=pair, stop=StopRules(max_new_tokens=args.tokens))
    load_s = perf_counter() - start
    prompt = np.random.default_rng(0).integers(1, pair.vocab_size, args.context)
    runner.run([TokenPrompt(1, prompt[:_WARM_UP])], lambda _: None)
    results: list[RequestResult] = []
    before, model_time.seconds = thread_time(), 0.0
    totals = runner.run([TokenPrompt(0, prompt)], results.append)
    host_s = thread_time() - before - model_time.seconds
    reports = getattr(runner.parts.executor, "reports", list)()
    runner.close()
    result = results[0]
    steps, answers = totals.steps, result.counters.answers
    config = pair.configs[0]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    nodes = runner.parts.policy.max_cached_nodes(runner.parts.executor.in_flight)
    slots = args.context + args.tokens + nodes
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * head
    itemsize = torch.empty(0, dtype=getattr(torch, pair.dtype)).element_size()
    weights = totals.target_bytes + (strategy not in WITHOUT_DRAFT) * totals.draft_bytes
    host_ms = host_s / steps * 1e3
    return {
        **key_of(args, strategy, sampling),
        "tokens": len(result.output),
        "steps": steps,
        "load_s": round(load_s, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB),
        "rank_peak_mb": max((round(r["peak_bytes"] / _MB) for r in reports), default=None),
        "weights_mb": round(weights / _MB),
        "cache_mb": round(slots * entry * itemsize / _MB, 1),
        "host_ms": round(host_ms, 2),
        "overhead": round(host_s / totals.wall_s, 4),
        "share_of_12_ms": round(host_ms / (host_ms + _TARGET_MS), 3),
        "bytes_per_step": totals.bytes_sent and round(totals.bytes_sent / steps),
        "accepted_per_pass": round(len(result.output) / max(1, answers), 2),
        "loop_share": loop_share([result.output]),
    }


def key_of(args: argparse.Namespace, strategy: str, sampling: str) -> dict[str, Any]:
    row = {"model": args.folder.name, "strategy": strategy, "sampling": sampling}
    return {**row, "stages": args.stages, "context": args.context}


def main() -> None:
    args = _arguments()
    if args.row is not None:
        try:
            row = run_row(args, *args.row)
        except UserError as error:
            row = {**key_of(args, *args.row), "refused": str(error)}
        print(json.dumps(row))
        return
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = [json.loads(line) for line in lines]
    for strategy in args.strategies:
        for sampling in args.samplings:
            key = key_of(args, strategy, sampling)
            if any(key.items() <= row.items() for row in done):
                continue
            command = [sys.executable, "-m", "experiments.scale.measure", *sys.argv[1:]]
            command += ["--row", strategy, sampling]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            if found.returncode:
                print(f"{strategy} {sampling}: {found.stderr.strip().splitlines()[-1]}", flush=True)
                continue
            line = found.stdout.strip().splitlines()[-1]
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of experiments.scale.checkpoints")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=16, help="generated tokens")
    parser.add_argument("--stages", type=int, default=1, help="processes of the target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
