"""Is the first choice of a plan the fastest in measured time?

    python -m experiments.plan.regret OUTPUT_DIR [--only CASE ...] [--quick] [--write]
    python -m experiments.plan.regret OUTPUT_DIR --control --only CASE ...
    python -m experiments.plan.regret OUTPUT_DIR --again [--only CASE ...]
    python -m experiments.plan.regret OUTPUT_DIR --samples [--only CASE ...]

For every case (pair x data x threads x batch; the bundled pair, and two of random weights whose
drafts have the target's first choice at 0.6 and 0.85 of positions) a profile of this machine is
measured and a plan is made; then its five best candidates and three others, plain decoding among
them (and presets as they are, where too few sizes are left), are run on the wall clock, in turns of
0.1 s, on other prompts than those of the record (both random samples of the data set). Regret is
the measured time per token of the first choice over that of the best of the eight. Prints a line
per case and the shares of cases within the bars: regret at most 5 % (wanted in 90 %), predicted
tokens/s of the first choice within 10 % (wanted in 80 %); also its gain over plain decoding.
``--control`` runs eight times the same candidate
instead: what one of them takes longer than the fastest is the noise of the machine, which no plan
can avoid. ``--again`` runs the eight of a stored case once more, on further prompts: how far a
measurement is from the same measurement at another time is the error that a plan has which is
right. ``--samples`` counts the tokens per answer of a stored case's first choice on the prompts of
its record and on those of its run: a plan cannot know by how much the samples differ. It measures
no time and needs no quiet machine. ``--write`` also writes the table to results/regret.md beside
this file, and all figures to results/regret.json. Needs a quiet machine and SPECDEC_DATA; continues
with the cases that OUTPUT_DIR/regret.json does not have.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.gpu.shapes import Shape, shape_of
from experiments.plan.regret_table import KINDS, line, page, pairs_of
from experiments.scale.checkpoints import agreeing_pair
from specdec.config.job import run_job_of
from specdec.files import write_json, write_text
from specdec.metrics import RequestResult
from specdec.metrics.times import decode_phase
from specdec.models.bundled import family_path
from specdec.planning.answer import Recommendation
from specdec.planning.job import plan_job, plan_request
from specdec.report.provenance import provenance
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.progress import Progress
from specdec.runs.runners import PartsRunner, run_interleaved

BUNDLED = "bundled"
_VOCAB = 4096  # of the bundled tokenizer, which the random pairs share
# Shape, layers of the draft, and the share of positions at which it has the target's first choice.
RANDOM: Mapping[str, tuple[Shape, int, float]] = {
    "random_60": (shape_of("random_60", 8, 512, 8, 2, 64, 1536, _VOCAB, tied=True), 1, 0.6),
    "random_85": (shape_of("random_85", 12, 128, 4, 2, 32, 384, _VOCAB, tied=True), 2, 0.85),
}
PAIRS = (BUNDLED, *RANDOM)
Tried = tuple[str, Mapping[str, Any], float | None]
"""Preset, sizes, and planned tokens per second; None for a preset that fills up."""

RESULT = "regret.json"
SETS = ("stdlib", "humaneval", "gsm8k")
BEST, OTHERS = 5, 3
CONTROL = "best_first"
"""The preset of which ``--control`` runs eight."""

# Prompts of the record, and batches of the runs. Times per token of single prompts scatter by 15 to
# 20 %, so that means over so many differ by 5 % (one standard deviation) for no other reason.
_PLANNED, _RUN = 24, {1: 18, 4: 6}
_TOKENS = 64
# In their own order the first 24 prompts of stdlib have 2.55 tokens per pass, the next 18 have 2.83
# (best_first with 8 nodes): a plan cannot know that. So the order is random, and another one in
# each case: an order in which the first prompts are the easier ones then counts once.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pair, its data, threads and batch size.

    Attributes:
        seed: key of the prompts' random order; 0 in cases that were stored without one.
    """

    pair: str
    data: str
    threads: int
    batch: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.pair}-{self.data}-t{self.threads}-b{self.batch}"

    def words(self, pairs: Path) -> list[str]:
        words = [f"data={self.data}", f"data.sample_seed={self.seed}", f"threads={self.threads}"]
        if self.pair == BUNDLED:
            return [*words, "model=tiny", "sampling=t06"]
        target, draft = (write_pair(self.pair, pairs) / part for part in ("target", "draft"))
        # At t06 78 % of the tokens of random_60 end an 8-gram that was generated before (stdlib).
        words += ["model=hf", f"model.target={target}", f"model.draft={draft}"]
        return [*words, "sampling=no_repeat4"]


def cases(quick: bool) -> list[Case]:
    """All cases; of the batch sizes 4 only for the bundled pair."""
    keys = [
        {"pair": pair, "data": data, "threads": threads, "batch": batch}
        for pair, data, threads in product(PAIRS, SETS, (1, 2))
        for batch in ((1, 4) if pair == BUNDLED else (1,))
    ]
    found = [Case(**of, seed=number) for number, of in enumerate(keys, 1)]
    return found[:1] if quick else found


def write_pair(name: str, folder: Path) -> Path:
    """The folder of a random pair, which is written first if it is not there."""
    there = folder / name
    if not (there / "pair.json").is_file():
        shape, draft_layers, wanted = RANDOM[name]
        target, draft, found = agreeing_pair(shape, shape.layers, draft_layers, wanted)
        for part, model in (("target", target), ("draft", draft)):
            model.save_pretrained(there / part)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(family_path("bundled:target")) / file, there / part)
        write_json(there / "pair.json", {"agreement": round(found, 3)})
    return there


def run_case(case: Case, folder: Path, quick: bool) -> dict[str, Any]:
    """The plan of a case and the measured times of eight of its candidates."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*case.words(folder.parent / "pairs"), f"max_new_tokens={_TOKENS}"]
    objective = f"objective={'latency' if case.batch == 1 else 'throughput'}"
    planned = [f"data.limit={_PLANNED}", "profile=measured", f"batch={case.batch}", objective]
    request = plan_request([*words, *planned])
    torch.set_num_threads(case.threads)
    choices = tried(plan_job(request, folder, Progress()).choices)
    # Where sizes of few presets are left, the presets as they are fill up the eight.
    for name, sizes, _ in list(choices):
        if sizes and len(choices) < BEST + OTHERS:
            choices.append((name, {}, None))
    return measured(case, folder, choices, quick)


def run_samples(case: Case, folder: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens and answers of a stored case's first choice on both samples, prompt by prompt."""
    count = _RUN[case.batch] * case.batch
    words = [*case.words(folder.parent / "pairs"), f"max_new_tokens={_TOKENS}"]
    words += [f"data.limit={_PLANNED + count}", "batch_size=1"]
    first = before["candidates"][0]
    cfg = _config(words, first["strategy"], first["sizes"])
    pair, prompts, _ = prepare(cfg)
    runner = PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair))
    totals = []
    for part in (prompts[:_PLANNED], prompts[_PLANNED:]):
        results: list[RequestResult] = []
        runner.run(part, results.append)
        totals.append(
            [sum(len(r.output) for r in results), sum(r.counters.answers for r in results)]
        )
    runner.close()
    return {"case": asdict(case), "planned": totals[0], "run": totals[1]}


def _config(words: Sequence[str], name: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    keys = [f"policy.{k}={json.dumps(v)}" for k, v in sizes.items()]
    cfg = dict(run_job_of([*words, f"strategy={name}", *keys]).config)
    if "stages" in cfg["executor"]:  # planned on one device
        cfg["executor"] = {**cfg["executor"], "stages": 1}
    return cfg


def measured(
    case: Case, folder: Path, choices: Sequence[Tried], quick: bool, skipped: int = 0
) -> dict[str, Any]:
    """What is stored of a case; ``turns`` are seconds and tokens of every batch of prompts.

    The first ``skipped`` batches after the prompts of the record are left out.
    """
    torch.set_num_threads(case.threads)
    count = (2 if quick else _RUN[case.batch]) * case.batch
    limit = _PLANNED + skipped * case.batch + count
    words = [*case.words(folder.parent / "pairs"), f"max_new_tokens={_TOKENS}"]
    words += [f"data.limit={limit}", f"batch_size={case.batch}"]
    candidates = [
        {
            "strategy": name,
            "sizes": dict(sizes),
            "planned_tokens_per_s": planned,
            "measured_tokens_per_s": sum(n for _, n in turns) / sum(s for s, _ in turns),
            "turns": turns,
        }
        for (name, sizes, planned), turns in zip(
            choices, _measured(words, choices, count, case.batch), strict=True
        )
    ]
    return {"case": asdict(case), "candidates": candidates}


def tried(choices: Sequence[Recommendation]) -> list[Tried]:
    """The five best of a plan's choices and three others, plain decoding in any case."""
    best, rest = list(choices[:BEST]), list(choices[BEST:])
    plain = [choice for choice in rest if choice.is_plain]
    others = [choice for choice in rest if not choice.is_plain]
    kept = [*best, *others[max(0, len(others) - (OTHERS - len(plain))) :], *plain]
    return [(choice.strategy, choice.sizes, choice.tokens_per_s) for choice in kept]


def _measured(
    words: Sequence[str],
    choices: Sequence[Tried],
    count: int,
    batch: int,
) -> list[list[tuple[float, int]]]:
    """Of each choice the seconds and tokens of every batch of the last ``count`` prompts."""
    runners = []
    done: list[list[tuple[float, int]]] = []
    pair = prompts = None
    for name, sizes, _ in choices:
        cfg = _config(words, name, sizes)
        if pair is None:
            pair, prompts, _ = prepare(cfg)
        runners.append(PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair)))
        done.append([])
    assert prompts is not None
    chosen = prompts[-count:]
    groups = [chosen[at : at + batch] for at in range(0, len(chosen), batch)]
    for runner in runners:
        runner.run(groups[0], lambda _: None)  # warms up
    for turn, group in enumerate(groups):
        order = np.roll(np.arange(len(runners)), turn).tolist()
        found = run_interleaved([runners[at] for at in order], group)
        for at, (results, totals) in zip(order, found, strict=True):
            phases = [decode_phase(result) for result in results]
            if batch == 1:
                turn_done = sum(p.seconds for p in phases), sum(p.tokens for p in phases)
            else:
                turn_done = totals.clock_s, sum(len(r.output) for r in results)
            done[at].append(turn_done)
    for runner in runners:
        runner.close()
    return done


def main() -> None:
    names = [case.name for case in cases(False)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE")
    parser.add_argument("--quick", action="store_true", help="one case of two prompts")
    parser.add_argument("--write", action="store_true")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--control", action="store_true", help="eight times the same candidate")
    other.add_argument("--again", action="store_true", help="the stored cases' runs once more")
    other.add_argument("--samples", action="store_true", help="tokens per answer of both samples")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / RESULT
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    planned = stored.setdefault("cases", {})
    kind = next((k for k in ("control", "again", "samples") if getattr(args, k)), "cases")
    found = stored.setdefault(kind, {})
    wanted = [case for case in cases(args.quick) if case.name in args.only]
    if kind in ("again", "samples"):  # on the prompts of the stored cases
        wanted = [Case(**planned[case.name]["case"]) for case in wanted if case.name in planned]
    for case in wanted:
        if case.name not in found:
            folder = args.output_dir / case.name
            if args.samples:
                result = run_samples(case, folder, planned[case.name])
            elif args.again:  # on prompts that follow the stored case's own
                before = planned[case.name]["candidates"]
                keys = ("strategy", "sizes", "planned_tokens_per_s")
                again = [tuple(c[key] for key in keys) for c in before]
                result = measured(case, folder, again, args.quick, len(before[0]["turns"]))
            elif args.control:
                same: list[Tried] = [(CONTROL, {}, None)] * (BEST + OTHERS)
                result = measured(case, folder, same, args.quick)
            else:
                result = run_case(case, folder, args.quick)
            result["provenance"] = provenance(command=["experiments.plan.regret"], config={})
            found[case.name] = result
            write_json(path, stored)
        print(f"{case.name}: {line(stored, kind, case.name)}", flush=True)
    print(KINDS[kind].summary(list(pairs_of(stored, kind).values())))
    if args.write:
        results = Path(__file__).parent / "results"
        write_text(results / "regret.md", page(stored))
        write_json(results / RESULT, stored)


if __name__ == "__main__":
    main()
