"""Two checkouts of this repository, timed in turns on the same comparison.

    python -m experiments.benchmarks.revisions OLD NEW [--pairs 5] [--figure tokens_per_s] WORDS...

WORDS are arguments of `specdec compare`, without `output_dir`. Each pair runs the comparison in a
fresh process of each checkout, the old one first in every second pair, so that slow changes of the
machine's speed fall on both. Prints the figure's median on both sides for each strategy, and the
median over pairs of the ratio new / old with its extremes. For a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def measure(checkout: Path, words: list[str], figure: str) -> dict[str, float]:
    """Strategy -> the figure, from one comparison in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "specdec.cli.main", "compare", *words, f"output_dir={folder}/c"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        rows = json.loads(Path(folder, "c/comparison.json").read_text(encoding="utf-8"))["rows"]
    return {row["strategy"]: float(row[figure]) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("words", nargs="+")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--figure", default="tokens_per_s")
    args = parser.parse_args()
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(args.pairs):
        found = {}
        for checkout in (args.old, args.new) if number % 2 == 0 else (args.new, args.old):
            found[checkout] = measure(checkout, args.words, args.figure)
        pairs.append((found[args.old], found[args.new]))
    print(f"{args.figure:16}{'old':>9}{'new':>9}   new/old (median, least, most of {args.pairs})")
    for strategy in pairs[0][0]:
        old, new = ([pair[side][strategy] for pair in pairs] for side in (0, 1))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        print(
            f"{strategy:16}{median(old):9.2f}{median(new):9.2f}"
            f"   {median(ratios):.3f}  {min(ratios):.3f}  {max(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
