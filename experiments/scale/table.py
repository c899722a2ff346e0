"""The rehearsal's rows as a page: ``python -m experiments.scale.table``.

Reads the JSON lines of ``experiments.scale.measure`` in results/ beside this file and writes
results/table.md: a table per shape with a row per strategy, sampling, number of processes, context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reproduce.rendering import grid
from experiments.scale.measure import SAMPLINGS, STRATEGIES
from specdec.files import write_text

RESULTS = Path(__file__).parent / "results"
_HEAD = (
    "strategy", "sampling", "target processes", "context", "load, s", "peak, MB",
    "peak of a rank, MB", "weights, MB", "cache, MB", "tokens", "steps", "host, ms per step",
    "beside 12 ms", "overhead here", "kB per step", "tokens per answer",
)  # fmt: skip


def page(rows: Sequence[Mapping[str, Any]], pairs: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables of all shapes.

    Args:
        rows: of ``experiments.scale.measure``, of any number of shapes.
        pairs: name of a shape's folder -> its pair.json.
    """
    lines = [
        "# Rehearsal at real shapes on a CPU\n",
        "Columns as `python -m experiments.scale.measure --help` states them; the commands are in"
        " docs/sizes.md. Written by `python -m experiments.scale.table`.",
    ]
    for name, pair in pairs.items():
        shape, some = pair["shape"], sorted((r for r in rows if r["model"] == name), key=_order)
        lines += [
            f"\n## {name}\n",
            f"{shape['layers']} layers of {shape['hidden']}, {shape['heads']} query and"
            f" {shape['kv_heads']} key/value heads, vocabulary {shape['vocab']:,}; draft layers:"
            f" {pair['draft_layers']}, with the target's first choice at"
            f" {100 * pair['agreement']:.0f} % of random tokens; target"
            f" {pair['target_bytes'] / 1e6:,.0f} MB, draft {pair['draft_bytes'] / 1e6:,.0f} MB.\n",
            *grid(_HEAD, [_line(row) for row in some if "refused" not in row]),
            *_refused([row for row in some if "refused" in row]),
        ]
    return "\n".join(lines) + "\n"


def _order(row: Mapping[str, Any]) -> tuple[int, ...]:
    return (
        row["context"],
        row["stages"],
        STRATEGIES.index(row["strategy"]),
        list(SAMPLINGS).index(row["sampling"]),
    )


def _line(row: Mapping[str, Any]) -> list[str]:
    sent, rank = row["bytes_per_step"], row["rank_peak_mb"]
    return [
        *(*_key(row), f"{row['load_s']:.1f}", f"{row['peak_mb']:,}"),
        *(f"{rank:,}" if rank else "-", f"{row['weights_mb']:,}", f"{row['cache_mb']:.1f}"),
        *(str(row["tokens"]), str(row["steps"]), f"{row['host_ms']:.2f}"),
        *(f"{100 * row['share_of_12_ms']:.0f} %", f"{100 * row['overhead']:.1f} %"),
        *(f"{sent / 1e3:,.0f}" if sent else "-", f"{row['accepted_per_pass']:.2f}"),
    ]


def _key(row: Mapping[str, Any]) -> list[str]:
    return [f"`{row['strategy']}`", row["sampling"], str(row["stages"]), str(row["context"])]


def _refused(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The combinations of a shape that the library refuses, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        name, sampling, stages, context = _key(row)
        some = reasons.setdefault(row["refused"], [])
        some.append(f"{name} {sampling} (target processes: {stages}, context: {context})")
    return [f"\nRefused: {'; '.join(some)}: {reason}" for reason, some in reasons.items()]


def main() -> None:
    rows, pairs = [], {}
    for path in sorted(RESULTS.glob("*-pair.json")):
        name = path.name.removesuffix("-pair.json")
        pairs[name] = json.loads(path.read_text(encoding="utf-8"))
        text = path.with_name(f"{name}.jsonl").read_text(encoding="utf-8")
        rows += [json.loads(line) for line in text.splitlines()]
    write_text(RESULTS / "table.md", page(rows, pairs))
    print(RESULTS / "table.md")


if __name__ == "__main__":
    main()
