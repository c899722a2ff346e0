"""The comparison of rows on SmolLM2 over data sets, samplings, precisions and threads.

    python -m experiments.smollm2.comparison OUT [--prompts 10] [--tokens 96] [--only TEXT]

Decodes every cell alone, one after the other; a cell is a run folder in OUT, so that the same
command continues after an interruption. ``OUT/comparison.csv`` has a row per cell and strategy,
``OUT/comparison.md`` a line per cell.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import specdec
from experiments.reproduce.rendering import grid

CONFIGS = Path(__file__).parent / "conf"
ROWS = ("ar", "suffix", "eagle3_sized", "adaptive")
SETS = ("humaneval", "gsm8k", "mt_bench", "xsum")
CELLS: dict[str, list[str]] = {
    f"{data}, {sampling}, {precision}, two threads": [
        f"data={data}",
        f"sampling={sampling}",
        f"model.quantization={quantization}",
        "threads=2",
    ]
    for precision, quantization in (("float32", "none"), ("int4", "int4"))
    for sampling in ("greedy", "t06")
    for data in SETS
} | {
    "humaneval, greedy, float32, one thread": ["data=humaneval", "threads=1"],
    "humaneval, greedy, int4, one thread": [
        *("data=humaneval", "model.quantization=int4", "threads=1")
    ],
    "books of 2000 tokens, greedy, float32, two threads": [
        *("data=gutenberg", "data.max_prompt_tokens=2000", "threads=2")
    ],
}
KEYS = {
    "tokens_per_s": "tokens/s",
    "speedup_wall": "vs ar",
    "acceptance_length": "accept len",
    "ttft_ms": "TTFT ms",
    "loop_share": "loops",
    "disturbed": "disturbed",
}


def measured(cell: str, words: Sequence[str], folder: Path) -> pd.DataFrame:
    """Decodes a cell, or reads it; returns a row per strategy."""
    found = specdec.compare(ROWS, words, config_dirs=[CONFIGS], output_dir=folder)
    rows = []
    for row in found.rows:
        low, high = row["speedup_wall_interval"] or (None, None)
        about: dict[str, Any] = {"cell": cell, "strategy": row["strategy"]}
        about |= {title: row[key] for key, title in KEYS.items()}
        rows.append(about | {"low": low, "high": high, "prompts": row["num_prompts"]})
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame) -> str:
    """A line per cell: of each row but ``ar`` the speed-up, its interval and tokens per pass."""
    lines = []
    for cell, rows in frame.groupby("cell", sort=False):
        line = {"cell": cell}
        for row in rows.to_dict("records"):
            if row["strategy"] == "ar":
                line |= {"prompts": row["prompts"], "ar, tokens/s": f"{row['tokens/s']:.1f}"}
                line["loops"] = f"{row['loops']:.0%}"
            else:
                ends = "" if pd.isna(row["low"]) else f" ({row['low']:.2f}-{row['high']:.2f})"
                line[row["strategy"]] = f"{row['vs ar']:.2f}{ends}, {row['accept len']:.2f}"
        lines.append(line)
    filled = pd.DataFrame(lines).fillna("-").astype(str)
    return "\n".join(grid(list(filled), filled.to_numpy())) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.smollm2.comparison")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", default="", help="cells whose name has this text")
    options = parser.parse_args()
    size = [f"data.limit={options.prompts}", f"max_new_tokens={options.tokens}", "repeats=1"]
    frames = []
    for cell, words in CELLS.items():
        if options.only in cell:
            print(cell, flush=True)
            folder = options.out / cell.replace(", ", "_").replace(" ", "-")
            frames.append(measured(cell, ["model=smollm2", *words, *size], folder))
            frame = pd.concat(frames)
            frame.to_csv(options.out / "comparison.csv", index=False, float_format="%.4g")
            (options.out / "comparison.md").write_text(table(frame), encoding="utf-8")
    print(table(frame))
    return 0


if __name__ == "__main__":
    sys.exit(main())
