"""How far the same decoding is from itself some minutes later, with nothing else running.

    python -m experiments.benchmarks.drift [--minutes 8] [--write] [KEY=VALUE ...]

Decodes the same prompts again and again with plain decoding (`ar`; further words are overrides of
`specdec run`), and compares the tokens/s of windows of time with those of windows that begin later.
A speed that was measured for so long, so many minutes before, predicts the present one no better,
whatever the method. Prints, per length of the windows and distance between their beginnings, the
share of pairs within 10 % and the standard deviation. Needs SPECDEC_DATA and a quiet machine.
``--write`` appends the lines to results/drift.md beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from specdec.config.job import run_job_of
from specdec.metrics import RequestResult
from specdec.metrics.times import decode_phase
from specdec.report.provenance import provenance
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.runners import PartsRunner
from specdec.types import FloatArray

NEAR = 0.1
WORDS = (
    *("model=tiny", "sampling=t06", "data=humaneval", "data.limit=16", "max_new_tokens=64"),
    *("threads=1", "strategy=ar"),
)
WINDOWS_S = (15, 30, 60)
LATER_S = (120, 180, 240)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    found = decoded([*WORDS, *args.overrides], args.minutes * 60.0)
    lines = report(found)
    print("\n".join(lines))
    if args.write:
        words = " ".join(["python -m experiments.benchmarks.drift", *args.overrides])
        made = provenance(command=["experiments.benchmarks.drift"], config={})
        revision, machine = str(made["git"]["revision"])[:7], made["hardware"]["cpu"]
        head = f"`{words}`, {args.minutes:g} minutes, revision {revision}; {machine}\n"
        with (Path(__file__).parent / "results" / "drift.md").open("a", encoding="utf-8") as page:
            page.write("\n".join(["", head, *lines]) + "\n")


def decoded(words: Sequence[str], seconds: float) -> FloatArray:
    """float64[n, 3]: when each prompt began, and the seconds and tokens of its decode phase."""
    cfg = dict(run_job_of(words).config)
    if isinstance(cfg["threads"], int):
        torch.set_num_threads(cfg["threads"])
    pair, prompts, _ = prepare(cfg)
    runner = PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair))
    runner.run(prompts[:1], lambda _: None)  # warms up
    zero, found = perf_counter(), []
    while perf_counter() - zero < seconds:
        for prompt in prompts:
            results: list[RequestResult] = []
            began = perf_counter() - zero
            runner.run([prompt], results.append)
            phase = decode_phase(results[0])
            found.append((began, phase.seconds, float(phase.tokens)))
    runner.close()
    return np.array(found)


def speeds(found: FloatArray, window_s: float) -> FloatArray:
    """float64[w]: tokens/s of windows that follow each other; prompts count where they begin."""
    at = (found[:, 0] // window_s).astype(int)
    seconds, tokens = (np.bincount(at, found[:, column]) for column in (1, 2))
    return np.asarray((tokens / seconds)[:-1])  # the last window is not complete


def report(found: FloatArray) -> list[str]:
    """A table: windows, and how far they are from later ones."""
    lines = [
        "| windows of | tokens/s | " + " | ".join(f"{later} s later" for later in LATER_S) + " |",
        "|---|---|" + "---|" * len(LATER_S),
    ]
    for window in WINDOWS_S:
        every = speeds(found, window)
        if len(every) < 2:
            continue
        cells = [f"{window} s (n = {len(every)})", f"{every.min():.0f} to {every.max():.0f}"]
        for later in LATER_S:
            lag = later // window
            change = every[lag:] / every[:-lag] - 1.0
            near = np.mean(np.abs(change) <= NEAR) if len(change) else 0.0
            told = f"{100 * near:.0f} % within 10 %, sd {100 * change.std():.0f} %"
            cells.append(told if len(change) else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
