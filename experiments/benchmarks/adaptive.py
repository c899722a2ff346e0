"""The preset ``adaptive`` against plain decoding and every fixed preset, in measured time.

    python -m experiments.benchmarks.adaptive [--limit 16] [--tokens 128] [--repeats 3]

Runs ``specdec compare`` on three workloads (``--only NAME`` for one): *hard*, text outside the
draft's domain at temperature 1 (``data=wmt14``), where speculation loses, and *humaneval* and
*gsm8k* at ``t06``. Needs a quiet machine and the files of SPECDEC_DATA. Prints, per workload,
``adaptive`` over ``ar`` and over the best fixed preset; the wanted ratios are at least 0.97 of
``ar`` on *hard* and 0.97 of the best one on the others. Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

STRATEGIES = ("ar", "best_first", "speculative", "suffix", "prompt_lookup", "adaptive")
WORKLOADS = {
    "hard": ["data=wmt14", "sampling=t06", *("sampling.temperature=1.0", "sampling.top_p=1.0")],
    "humaneval": ["data=humaneval", "sampling=t06"],
    "gsm8k": ["data=gsm8k", "sampling=t06"],
}
WANTED = 0.97


def main() -> int:
    """Runs the benchmark; 1 if a ratio is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=WORKLOADS, default=None)
    args = parser.parse_args()
    missed = 0
    for name, words in WORKLOADS.items():
        if args.only not in (None, name):
            continue
        ratio, line = verdict(name, rates(words, args))
        print(line, flush=True)
        missed += ratio < WANTED
    return int(missed > 0)


def rates(words: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Strategy -> tokens per second of one interleaved comparison."""
    folder = Path(mkdtemp(prefix="adaptive-"))
    command = [
        *(sys.executable, "-c", "from specdec.cli.main import main; raise SystemExit(main())"),
        *("compare", f"strategies=[{','.join(STRATEGIES)}]", *words, f"data.limit={args.limit}"),
        *(f"max_new_tokens={args.tokens}", f"repeats={args.repeats}", "threads=1"),
        f"output_dir={folder}",
    ]
    subprocess.run(command, check=True)
    table = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    return {row["strategy"]: row["tokens_per_s"] for row in table["rows"]}


def verdict(name: str, found: dict[str, float]) -> tuple[float, str]:
    """(ratio that counts for the workload, line to print)."""
    fixed = {each: rate for each, rate in found.items() if each != "adaptive"}
    best = max(fixed, key=fixed.__getitem__)
    of_plain, of_best = found["adaptive"] / found["ar"], found["adaptive"] / fixed[best]
    ratio = of_plain if name == "hard" else of_best
    word = "reached" if ratio >= WANTED else "missed"
    return ratio, (
        f"{name}: adaptive is {of_plain:.3f} of ar and {of_best:.3f} of the best fixed preset"
        f" ({best}); {WANTED} {word}"
    )


if __name__ == "__main__":
    sys.exit(main())
