"""``model.exact``: token differences from plain decoding, and what exactness costs.

    python -m experiments.benchmarks.exact tokens --out FOLDER [options]
    python -m experiments.benchmarks.exact cost --out FOLDER [options]

``tokens`` decodes the same prompts by each strategy and by plain decoding, with ``model.exact``
true and false, and counts the tokens that differ; one line per row is appended to
FOLDER/tokens.jsonl, so that rows can be run one by one. Plain decoding (``ar``) runs on one device,
for tensor-parallel strategies on the same groups of processes. A prompt counts as different from
its first differing token to its end, because the outputs have nothing in common after it.

``cost`` times each strategy with ``model.exact`` true and false, interleaved prompt by prompt, and
writes FOLDER/cost.json: medians over prompts of the time per token, divided by that of ``ar`` with
``model.exact=false``. It needs an idle machine; tokens do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec.certify.numerics import plain_config
from specdec.config.job import run_job_of
from specdec.files import write_json
from specdec.metrics import RequestResult
from specdec.metrics.compare import first_difference
from specdec.metrics.loops import loop_share
from specdec.report.provenance import provenance
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt

PIPELINE = ["executor.stages=4"]
METHODS: Mapping[str, Sequence[str]] = {
    "ar": ["strategy=ar"],
    "best_first": ["strategy=best_first"],
    "specinfer": ["strategy=specinfer"],
    "specpipe": ["strategy=specpipe", *PIPELINE],
    "swiftspec": [
        *("strategy=swiftspec", "executor.target_degree=2", "executor.draft_degree=1"),
        "executor.transport=distributed",
    ],
    "ppsd": ["strategy=ppsd"],
    "specpipe_db": ["strategy=specpipe_db", *PIPELINE, "batch_size=8", "prefill_chunk=100"],
}
"""Name -> overrides. Two devices of the target and one of the draft are processes."""

MODELS: Mapping[str, Sequence[str]] = {
    "tiny": ["model=tiny"],
    "vocabulary": [
        *("model=random", "model.vocab_size=128256", "model.hidden_size=64", "model.num_layers=4")
    ],
}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    {"tokens": count_differences, "cost": measure_cost}[args.part](args)


def count_differences(args: argparse.Namespace) -> None:
    for exact in args.exact:
        references: dict[bool, dict[int, RequestResult]] = {}
        for name in args.methods:
            cfg = configured(args, METHODS[name], exact=exact)
            pair, prompts, _ = prepare(cfg)
            shared = bool(cfg["executor"].get("target_degree"))
            if shared not in references:
                references[shared] = outputs({**plain_config(cfg), "batch_size": 1}, pair, prompts)
            found = compared(outputs(cfg, pair, prompts), references[shared])
            keys = ("model", "dtype", "sampling", "threads")
            row = {"strategy": name, **{key: getattr(args, key) for key in keys}, "exact": exact}
            row |= found
            print(row, flush=True)
            with (args.out / "tokens.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "provenance": _origin(cfg)}) + "\n")


def measure_cost(args: argparse.Namespace) -> None:
    runners: dict[tuple[str, bool], PartsRunner] = {}
    times: dict[tuple[str, bool], list[float]] = {}
    for exact in (False, True):
        for name in args.methods:
            cfg = configured(args, METHODS[name], exact=exact)
            pair, prompts, _ = prepare(cfg)
            runners[name, exact] = PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair))
            times[name, exact] = []
    for prompt in [prompts[0], *prompts * args.repeats]:  # the first one warms up
        for key, runner in runners.items():
            results: list[RequestResult] = []
            totals = runner.run([prompt], results.append)
            times[key].append(totals.wall_s / len(results[0].output))
    for runner in runners.values():
        runner.close()
    plain = times["ar", False][1:]
    rows = []
    for (name, exact), all_seconds in times.items():
        seconds = all_seconds[1:]
        over = median(mine / base for mine, base in zip(seconds, plain, strict=True))
        times_of = {
            "ms_per_token": round(1e3 * median(seconds), 3),
            "time_over_plain": round(over, 3),
        }
        rows.append({"strategy": name, "exact": exact, **times_of})
        print(rows[-1], flush=True)
    settings = {"model": args.model, "dtype": args.dtype, "threads": args.threads}
    measured = {**settings, "repeats": args.repeats, "prompts": len(prompts), "rows": rows}
    write_json(args.out / "cost.json", {**measured, "provenance": _origin(cfg)})


def configured(args: argparse.Namespace, method: Sequence[str], *, exact: bool) -> dict[str, Any]:
    size = (f"data.limit={args.prompts}", f"max_new_tokens={args.new_tokens}", "ignore_eos=true")
    numerics = (f"model.dtype={args.dtype}", f"model.exact={str(exact).lower()}")
    overrides = [*method, *MODELS[args.model], *numerics, *size]
    overrides += [f"sampling={args.sampling}", f"threads={args.threads}"]
    cfg = run_job_of(overrides).config
    if cfg["model"]["kind"] == "random":
        cfg["model"]["logit_scale"] = 4.0  # sharper, so that drafts are accepted
    return cfg


def outputs(
    cfg: Mapping[str, Any], pair: Any, prompts: Sequence[TokenPrompt]
) -> dict[int, RequestResult]:
    runner = PartsRunner(cfg=dict(cfg), pair=pair, stop=stop_rules(cfg, pair))
    results: dict[int, RequestResult] = {}
    try:
        runner.run(prompts, lambda result: results.update({result.id: result}))
    finally:
        runner.close()
    return results


def compared(
    ours: Mapping[int, RequestResult], plain: Mapping[int, RequestResult]
) -> dict[str, Any]:
    """Differences of outputs with the same ids; ``first``: the earliest place of one."""
    places = {i: first_difference(ours[i].output, plain[i].output) for i in plain}
    found = {i: at for i, at in places.items() if at is not None}
    texts = [list(result.output) for result in ours.values()]
    return {
        "tokens": sum(map(len, texts)),
        "requests": len(texts),
        "requests_that_differ": len(found),
        "tokens_that_differ": sum(len(plain[i].output) - at for i, at in found.items()),
        "first": min(found.values(), default=None),
        "loop_share": round(loop_share(texts) or 0.0, 3),
    }


def _origin(cfg: Mapping[str, Any]) -> dict[str, Any]:
    return provenance(command=sys.argv, config=cfg)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["tokens", "cost"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS)[1:])
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sampling", default="t06")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--exact", nargs="+", type=lambda t: t == "true", default=[True, False])
    args = parser.parse_args()
    if args.part == "cost" and "ar" not in args.methods:
        args.methods = ["ar", *args.methods]
    return args


if __name__ == "__main__":
    main()
