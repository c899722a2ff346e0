"""Whether comparisons notice other work on the machine: quiet runs, then runs beside busy loops.

    python -m experiments.benchmarks.disturbance [--quiet 10] [--busy 3] [--loops 2] [KEY=VALUE ...]

Needs a machine on which nothing else runs; further words are overrides of `specdec compare`. Prints
a line per run and checks that no quiet run says that it was disturbed, and that every run beside
the busy loops says so or has ratios within 10 % of the quiet ones. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

COMPARE = ("strategies=[ar,best_first]", "repeats=3", "data=stdlib", "data.limit=4")
TOLERANCE = 0.10
"""Largest relative difference of a ratio that is not said to be disturbed."""

_BUSY = "while True: pass"


def main() -> int:
    """Runs the comparisons; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quiet", type=int, default=10)
    parser.add_argument("--busy", type=int, default=3)
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load averages {os.getloadavg()}")
    with tempfile.TemporaryDirectory() as folder:
        quiet = [compare(Path(folder) / f"quiet{run}", args.overrides) for run in range(args.quiet)]
        usual = {name: median(row[name][0] for row in quiet) for name in quiet[0]}
        with busy_loops(args.loops):
            busy = [
                compare(Path(folder) / f"busy{run}", args.overrides) for run in range(args.busy)
            ]
    false_alarms = sum(any(said for _, said in row.values()) for row in quiet)
    missed = sum(
        not any(said for _, said in row.values())
        and any(abs(ratio / usual[name] - 1) > TOLERANCE for name, (ratio, _) in row.items())
        for row in busy
    )
    print(f"{false_alarms} of {args.quiet} quiet runs say that they were disturbed")
    print(
        f"{missed} of {args.busy} runs beside {args.loops} busy loops are wrong and do not say so"
    )
    return int(bool(false_alarms or missed))


def compare(folder: Path, overrides: Sequence[str]) -> dict[str, tuple[float, int]]:
    """One run: strategy -> its ratio to ``ar`` and the number of disturbed measurements."""
    words = [*COMPARE, *overrides, f"output_dir={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "specdec.cli.main", "compare", *words],
        check=True,
        capture_output=True,
        text=True,
    )
    rows = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["rows"]
    said = "DISTURBED" in done.stdout
    assert said == any(row["disturbed"] for row in rows), "the table and its file disagree"
    texts = [
        f"{row['strategy']} {row['speedup_wall']:.2f}x, median of prompts"
        f" {row['speedup_prompt_median']:.2f}x, disturbed {row['disturbed']}"
        for row in rows
    ]
    print(f"{folder.name:<8} {'; '.join(texts)}", flush=True)
    return {row["strategy"]: (row["speedup_wall"], row["disturbed"]) for row in rows}


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """So many processes that only burn CPU time, while the block runs."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
