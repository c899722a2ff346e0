"""`specdec verify` of every early-exit preset, with stages as large as the exit and smaller ones.

    python -m experiments.ppsd.certify_presets [--transports in_process distributed]
        [--models random tiny] [--strategies eesd eesd_ts eesd_multi ppsd ppsd_tree ppsd_multi]
        [--sampling t06] [--out outputs/ppsd_verified]

One `specdec verify` per line, with its exit status (0: lossless). Each checks greedy output and
sampled output with --sampling; both models have 24 layers. Only pipelines run over ranks. Returns 0
if all runs do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import perf_counter

from specdec.cli.main import main as specdec

MODELS = {
    "random": ("model=random", "model.num_layers=24", "model.exit_head=transformer"),
    "tiny": ("model=tiny",),
}
LAYOUTS = ((2, 12), (3, 9), (4, 6), (8, 3), (8, 6))
"""Stages and layers before the exit; in the last layout a draft token passes two stages."""

TINY_HEADS = {12: ("model.exit_head=norm",), 9: ("model.exit_heads=null",)}
"""The shipped heads: a norm head at 12, and none at 9 (untrained there)."""

LOCAL = ("eesd", "eesd_ts", "eesd_multi")
SEVERAL = ("eesd_multi", "ppsd_multi")
"""Presets with further exits at layers without a shipped head of the same kind: untrained."""


def main() -> int:
    """Runs the grid; returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds, presets = ("in_process", "distributed"), (*LOCAL, "ppsd", "ppsd_tree", "ppsd_multi")
    parser.add_argument("--transports", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", choices=presets, default=list(presets))
    parser.add_argument("--sampling", default="t06")
    parser.add_argument("--out", type=Path, default=Path("outputs/ppsd_verified"))
    args = parser.parse_args()
    statuses = []
    for transport in args.transports:
        for overrides in grid(args.strategies, args.models, transport):
            statuses.append(verify((*overrides, f"sampling={args.sampling}"), args.out))
    print(f"{statuses.count(0)} of {len(statuses)} certified lossless")
    return int(any(statuses))


def grid(
    strategies: Sequence[str], models: Sequence[str], transport: str
) -> Iterator[tuple[str, ...]]:
    """Overrides of `specdec verify` for each run."""
    for strategy in strategies:
        if transport == "distributed" and strategy in LOCAL:
            continue
        over = () if strategy in LOCAL else (f"executor.transport={transport}",)
        for model in models:
            for stages, layer in LAYOUTS:
                heads = TINY_HEADS.get(layer, ()) if model == "tiny" else ()
                if model == "tiny" and strategy in SEVERAL:
                    heads = ("model.exit_heads=null",)
                exit_at = (f"executor.stages={stages}", f"model.exit_layer={layer}")
                yield f"strategy={strategy}", *MODELS[model], *exit_at, *heads, *over


def verify(overrides: Sequence[str], out: Path) -> int:
    """Runs `specdec verify` in its own folder, prints a line and returns the exit status."""
    folder = out / "-".join(word.rpartition("=")[2] for word in overrides)
    began, output = perf_counter(), StringIO()
    with redirect_stdout(output):
        status = specdec(["verify", *overrides, f"output_dir={folder}"])
    print(f"exit {status}  {perf_counter() - began:5.0f} s  {' '.join(overrides)}", flush=True)
    if status:
        print(output.getvalue(), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
