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

import pandas as pd


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
    sides, found = {"old": args.old, "new": args.new}, []
    for number in range(args.pairs):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            figures = measure(sides[side], args.words, args.figure)
            found += [(number, side, *figure) for figure in figures.items()]
    table = pd.DataFrame(found, columns=["pair", "side", "strategy", args.figure])
    table = table.pivot(index=["strategy", "pair"], columns="side", values=args.figure)
    table["new/old"] = table["new"] / table["old"]
    shown = {"old": "median", "new": "median", "new/old": ["median", "min", "max"]}
    print(f"{args.figure}, {args.pairs} pairs")
    print(table.groupby("strategy", sort=False).agg(shown).to_string(float_format="%.3f"))


if __name__ == "__main__":
    main()
