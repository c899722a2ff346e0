"""Paced against simulated time of the asynchronous strategies, on real processes.

    python -m experiments.benchmarks.paced [--only pearl ssd]

Runs each strategy twice with the same profile: on the simulated clock, and over processes on the
paced clock, whose passes take the profile's times. The profile is stretched by ``clock.scale`` so
far that this machine computes each pass within its time. Prints a table and stores it: times per
token, their ratio, and whether tokens, passes, hits and unused nodes are the same. Needs a machine
without other work.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from specdec.cli.main import main
from specdec.files import write_json

RESULT = Path(__file__).with_name("results") / "paced.json"
TWO_GROUPS = ("clock.profile=swiftspec_table6", "clock.scale=15")
PIPELINE = ("clock.profile=specpipe_8x3090", "clock.scale=3")
CASES = {
    "pearl": TWO_GROUPS,
    "ssd": TWO_GROUPS,
    "amusd": TWO_GROUPS,
    "pipeinfer": PIPELINE,
    "flowspec": PIPELINE,
    "specpipe": PIPELINE,
}
WORKLOAD = ("data=humaneval", "sampling=t06", "threads=1")
COUNTS = ("new_tokens", "accepted_tokens", "target_passes", "hit_rate", "wasted_nodes")


def compare() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("outputs/paced"), help="run folders")
    args = parser.parse_args()
    size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}")
    stored = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    rows = [row for row in stored.get("rows", []) if row["strategy"] not in args.only]
    print("strategy     simulated ms   paced ms / scale   ratio   counts equal   overruns")
    for name in args.only:
        rows.append(measured(name, (*WORKLOAD, *size), args.out))
        print(line(rows[-1]), flush=True)
    rows.sort(key=lambda row: list(CASES).index(row["strategy"]))
    write_json(RESULT, {"workload": [*WORKLOAD, *size], "rows": rows})
    return 0 if all(row["counts"] for row in rows) else 1


def measured(name: str, workload: tuple[str, ...], out: Path) -> dict[str, Any]:
    """The row of a strategy."""
    profile, scale = CASES[name]
    common = (f"strategy={name}", *workload, profile)
    simulated = run(out / f"{name}-simulated", *common, "clock=simulated")
    over = "executor.transport=distributed"
    paced = run(out / f"{name}-paced", *common, scale, "clock=paced", over)
    factor = float(scale.partition("=")[2])
    ms = paced["tbt_ms_mean"] / factor
    return {
        "strategy": name,
        "profile": profile.partition("=")[2],
        "scale": factor,
        "simulated_ms": simulated["tbt_ms_mean"],
        "paced_ms": ms,
        "ratio": ms / simulated["tbt_ms_mean"],
        "counts": all(simulated[key] == paced[key] for key in COUNTS),
        "overrun_share": paced["overrun_share"],
        "loop_share": paced["loop_share"],
        "git": paced["revision"],
    }


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    """The summary of ``specdec run``, and its revision."""
    with redirect_stdout(io.StringIO()):
        status = main(["run", *overrides, f"output_dir={folder}"])
    if status:
        raise SystemExit(status)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    return {**summary, "revision": provenance["git"]["revision"][:10]}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    return (
        f"{row['strategy']:12s}{row['simulated_ms']:13.2f}{row['paced_ms']:19.2f}"
        f"{row['ratio']:8.3f}{'yes' if row['counts'] else 'NO':>15s}"
        f"{100 * row['overrun_share']:9.1f} %"
    )


if __name__ == "__main__":
    sys.exit(compare())
