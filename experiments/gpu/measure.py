"""Measures the GPU path, unattended, in under 8 minutes.

    python -m experiments.gpu.measure [--smoke] [--out DIR] [--budget-s 450]

Copy bandwidth; latency of a pass against the number of nodes for Llama shapes with random weights;
each kernel against its alternatives; whole strategies with replayed and with real acceptances.
Writes gpu.json (all figures, device, versions) and gpu.md again after every part, so that a later
failure loses nothing. ``--smoke`` runs everything at tiny shapes on any machine, as a test of the
script; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from experiments.gpu.kernels import attention_rows, swiglu_rows
from experiments.gpu.passes import pass_rows
from experiments.gpu.requirements import LIMIT_S, verdicts
from experiments.gpu.shapes import FULL, LLAMA3_1B, LLAMA3_8B, SMOKE_DRAFT, SMOKE_TARGET
from experiments.gpu.strategies import shape_rows, trained_rows
from experiments.gpu.timing import Bench, copy_bandwidth
from experiments.reproduce.rendering import grid
from specdec.files import write_json, write_text
from specdec.report.provenance import provenance

Rows = list[dict[str, Any]]
SMOKE_NOTE = "SMOKE RUN: tiny shapes, to show that the script works; the figures mean nothing."


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, any machine")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument(
        "--budget-s", type=float, default=450.0, help="seconds after which no part starts"
    )
    parser.add_argument("--attention", default="auto", help="auto: triton on a GPU, else dense")
    parser.add_argument("--kernels", default="torch", help="torch or triton, for whole passes")
    args = parser.parse_args(words)
    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device: only --smoke runs here", file=sys.stderr)
        return 2
    if not args.smoke:  # a kernel that hangs cannot be caught
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        return _run(args)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(args: argparse.Namespace) -> int:
    start = perf_counter()
    bench = make_bench(args)
    settings = {"dtype": str(bench.dtype).removeprefix("torch.")}
    settings |= {k: getattr(bench, k) for k in ("attention", "graphs", "kernels", "repeats")}
    settings["timed"] = "CUDA events around replays" if bench.captured else "calls, no graphs"
    result: dict[str, Any] = {
        "smoke": args.smoke,
        "note": SMOKE_NOTE if args.smoke else "",
        "device": torch.cuda.get_device_name() if bench.captured else "cpu",
        "settings": settings,
        "copy_bandwidth_gb_per_s": None,
        "problems": [],
        "provenance": provenance(command=["experiments.gpu.measure"], config=settings),
    }

    def write() -> None:
        result["wall_s"] = perf_counter() - start
        result["bars"] = verdicts(result)
        write_json(args.out / "gpu.json", result)
        write_text(args.out / "gpu.md", page(result))

    measure(bench, result, write, smoke=args.smoke)
    print(page(result))
    return 0


def make_bench(args: argparse.Namespace) -> Bench:
    cuda = torch.cuda.is_available() and not args.smoke
    return Bench(
        device="cuda" if cuda else "cpu",
        dtype=torch.bfloat16 if cuda else torch.float32,
        repeats=30 if cuda else 2,
        copy_mib=1024 if cuda else 1,
        cold_mib=256 if cuda else 0,
        deadline=perf_counter() + args.budget_s,
        attention=("triton" if cuda else "dense") if args.attention == "auto" else args.attention,
        graphs="cuda" if cuda else "replay",
        kernels=args.kernels,
    )


def measure(
    bench: Bench, result: dict[str, Any], write: Callable[[], None], *, smoke: bool
) -> None:
    """Fills ``result`` with rows by section; a failing part is recorded, the others continue."""
    bandwidth = copy_bandwidth(bench)
    result["copy_bandwidth_gb_per_s"] = bandwidth / 1e9
    shapes = (SMOKE_TARGET,) if smoke else FULL
    contexts = (16,) if smoke else (500, 1000, 4000)
    stress = (24, 5) if smoke else (16000, 64)
    kernel_shape = shapes[0]
    sections: dict[str, list[Callable[[], Rows]]] = {
        "kernels": [
            *(
                lambda c=c: attention_rows(bench, kernel_shape, context=c, nodes=8)
                for c in contexts
            ),
            lambda: attention_rows(bench, kernel_shape, context=stress[0], nodes=stress[1]),
            lambda: swiglu_rows(bench, kernel_shape, nodes=8),
        ],
        "passes": [
            *(
                lambda s=s: pass_rows(bench, s, context=contexts[0], bandwidth=bandwidth)
                for s in shapes
            ),
            lambda: pass_rows(bench, shapes[0], context=stress[0], bandwidth=bandwidth),
        ],
        "strategies": [
            lambda: shape_rows(
                bench,
                SMOKE_TARGET if smoke else LLAMA3_8B,
                SMOKE_DRAFT if smoke else LLAMA3_1B,
                num_prompts=1 if smoke else 6,
                max_new_tokens=8 if smoke else 128,
            ),
            lambda: trained_rows(
                bench, num_prompts=1 if smoke else 6, max_new_tokens=12 if smoke else 128
            ),
        ],
    }
    result |= {name: [] for name in sections}
    for name in ("passes", "strategies", "kernels"):  # the required figures come first
        for number, part in enumerate(sections[name]):
            start = perf_counter()
            problem = _part(bench, part, result[name])
            if problem is not None:
                result["problems"].append(f"{name}[{number}]: {problem}")
            write()
            print(f"{name}[{number}]: {perf_counter() - start:.0f} s", file=sys.stderr)


def _part(bench: Bench, part: Callable[[], Rows], rows: Rows) -> str | None:
    """Adds the rows of a part; returns its problem, if any."""
    if bench.late():
        return "no time left"
    try:
        rows += part()
    except Exception as error:  # the other parts continue
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        gc.collect()  # models in reference cycles
        if bench.captured:
            torch.cuda.empty_cache()
    return None


TABLES = {
    "bars": ["bar", "wanted", "found", "verdict"],
    "passes": [
        "shape", "context", "nodes", "ms", "over_one_node", "bandwidth_share", "attention",
        "graphs",
    ],
    "kernels": ["kernel", "shape", "context", "nodes", "side", "us", "over_ours", "skipped"],
    "strategies": [
        "pair", "acceptances", "strategy", "tokens_per_s", "tokens_per_s_net", "speedup",
        "acceptance_length", "overhead_share", "relative_memory_traffic", "loop_share", "skipped",
    ],
}  # fmt: skip


def page(result: dict[str, Any]) -> str:
    lines = ["# GPU path", ""]
    if result["note"]:
        lines += [f"**{result['note']}**", ""]
    settings = ", ".join(f"{key}={value}" for key, value in result["settings"].items())
    rate = result["copy_bandwidth_gb_per_s"]
    lines += [
        f"Device: {result['device']}; {settings}.",
        f"Copy bandwidth (read + written): {_cell(rate)} GB/s. Medians after warm-up.",
        "Strategies marked `replayed`: both models run in full with random weights, and a record",
        "says what is accepted; `net` is without what the replay itself takes.",
    ]
    for name, columns in TABLES.items():
        rows = [[_cell(row.get(column)) for column in columns] for row in result.get(name, [])]
        lines += ["", f"## {name}", "", *grid(columns, rows)]
    if result["problems"]:
        lines += ["", "## Problems", "", *(f"- {problem}" for problem in result["problems"])]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
