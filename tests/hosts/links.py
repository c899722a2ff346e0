"""Pipelines over slow links between hosts, against the simulated clock with the measured links.

    python -m tests.hosts.links [--rates none 1gbit 100mbit] [--delays 0 1 10]
        [--strategies specpipe ppsd ar] [--profile FILE] [--scale 2] [--tokens 32]
        [--words model=smollm2 ...] [--out outputs/links]

Builds four hosts, limits the link of each (``tc tbf``), measures half of a round trip of 1, 8 and
64 rows between two of them, and adds that as ``transfer`` to the profile (default: stages of 30
ms). Each strategy then runs in 4 stages: simulated in one process, and paced over torchrun on the
hosts. A delay is added to the profile's transfers, which the paced ranks wait for: kernels without
netem cannot delay packets. Prints a table and writes ``links.md`` and ``links.json``. Times count
only on an idle machine: a paced row with more than 2 % overruns is marked.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import yaml

from specdec.distributed.transport import gloo_group
from tests.distributed.processes import ROOT, environment
from tests.hosts.machines import Host, hosts, ip, torchrun, wait_all

ROWS = (1, 8, 64)
REPEATS = 20
PORT = 29511
MODEL = (
    *("model=random", "model.num_layers=4", "model.hidden_size=576", "model.num_heads=9"),
    "model.dtype=float32",
)
METHODS = {
    "specpipe": ("strategy=specpipe", "policy.width=8", "policy.children=4"),
    "ppsd": ("strategy=ppsd", "executor=pipeline", "model.exit_layer=1"),
    "ar": ("strategy=ar", "executor=pipeline"),
}
HEAD = (
    "| link | delay, ms | transfer of 1, 8, 64 rows, ms | method | simulated TBT, ms"
    " | paced TBT, ms | difference | overruns | bytes per step: rows at most | sent by ranks"
    " | on the links |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "100mbit"])
    parser.add_argument("--delays", nargs="+", type=float, default=[0.0, 1.0, 10.0])
    parser.add_argument("--strategies", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--profile", type=Path, default=ROOT / "conf/profile/uniform_30ms.yaml")
    parser.add_argument("--scale", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--words", nargs="+", default=list(MODEL))
    parser.add_argument("--width", type=int, default=576, help="hidden size of the model")
    parser.add_argument("--out", type=Path, default=Path("outputs/links"))
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)  # rank and address
    args = parser.parse_args()
    if args.side:
        print(json.dumps(round_trips(int(args.side[0]), args.side[1], args.width)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    rows: list[dict[str, Any]] = []
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n")
    for rate in args.rates:
        with hosts(4) as built:
            for host in built:
                if rate != "none":
                    host.limit(rate)
            measured = measure(built, args.width)
            for delay in args.delays:
                profile = args.out / f"{rate}-{delay:g}ms.yaml"
                write_profile(args.profile, profile, [(m + delay) / args.scale for m in measured])
                for name in args.strategies:
                    row = {"rate": rate, "delay": delay, "measured": measured, "method": name}
                    row |= compare(built, name, profile, args)
                    rows.append(row)
                    print(line(row), flush=True)
    (args.out / "links.json").write_text(json.dumps(rows, indent=1))
    table = [HEAD, "|---" * HEAD.count(" | ") + "|---|", *map(line, rows)]
    (args.out / "links.md").write_text("\n".join(table) + "\n")


def round_trips(rank: int, address: str, width: int) -> list[float]:
    """Runs on each of two hosts; returns the median of half a round trip per size, in ms."""
    os.environ["MASTER_ADDR"] = address
    store = dist.TCPStore(address, PORT, is_master=rank == 0, wait_for_workers=False)
    group = gloo_group(store, rank, 2, loopback=False)
    medians = []
    for num in ROWS:
        times = []
        rows = torch.ones(num, width)
        received = torch.empty_like(rows)
        for _ in range(REPEATS + 1):
            posted = group.recv([received], 1 - rank, 0)
            start = perf_counter()
            if rank == 1:
                posted.wait()
            sent = group.send([rows], 1 - rank, 0)
            if rank == 0:
                posted.wait()
            times.append((perf_counter() - start) / 2 * 1e3)
            sent.wait()
        medians.append(statistics.median(times[1:]))
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{1 - rank}"])  # the peer may still be reading
    return medians


def measure(built: Sequence[Host], width: int) -> list[float]:
    """Measures the link between the first two hosts."""
    sides = [
        subprocess.Popen(
            built[rank].command(
                [
                    *(sys.executable, "-m", "tests.hosts.links", "--width", str(width)),
                    *("--side", str(rank), built[0].address),
                ]
            ),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [side.communicate(timeout=120)[0] for side in sides]
    return [float(ms) for ms in json.loads(said[0])]


def write_profile(source: Path, target: Path, transfer: Sequence[float]) -> None:
    """Copies a profile with other transfers, given in milliseconds before ``clock.scale``."""
    profile = yaml.safe_load(source.read_text())
    profile["costs"]["transfer"] = {"tokens": list(ROWS), "ms": [round(ms, 4) for ms in transfer]}
    profile.setdefault("origins", {})["transfer"] = "measured between two hosts, and a delay"
    target.write_text(yaml.safe_dump(profile))


def sent_bytes(built: Sequence[Host]) -> int:
    total = 0
    for host in built:
        said = json.loads(ip("-n", host.name, "-j", "-s", "link", "show", "eth0"))
        total += int(said[0]["stats64"]["tx"]["bytes"])
    return total


def compare(
    built: list[Host], name: str, profile: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Runs a method on both clocks; returns the figures of its row."""
    folder = args.out / f"{profile.stem}-{name}"
    words = [
        *METHODS[name],
        *args.words,
        *("executor.stages=4", "data=stdlib", "data.limit=2", "threads=1"),
        *(f"max_new_tokens={args.tokens}", f"clock.profile={profile}"),
        f"clock.scale={args.scale}",
    ]
    run = [sys.executable, "-m", "specdec.cli.main", "run"]
    simulated, paced, job = folder / "simulated", folder / "paced", folder / "job.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    specdec([*run, *words, "clock=simulated", f"output_dir={simulated}"])
    job.write_text(
        specdec([*run, "--cfg", *words, "clock=paced", "executor.transport=distributed"])
    )
    before = sent_bytes(built)
    statuses = wait_all(torchrun(built, job, paced, ranks=(2, 1, 1, 1)), 1200)
    if statuses != [0] * 4:
        raise SystemExit(f"{name} over {profile.stem} failed: {statuses}; logs are in {folder}")
    sim, real = (json.loads((f / "summary.json").read_text()) for f in (simulated, paced))
    steps = real["steps"]
    return {
        "simulated": sim["tbt_ms_mean"] / args.scale,
        "paced": real["tbt_ms_mean"] / args.scale,
        "overruns": real["overrun_share"],
        "rows_bytes": 3 * real["target_rows"] / steps * args.width * 4,
        "rank_bytes": real["bytes_sent_per_step"],
        "link_bytes": (sent_bytes(built) - before) / steps,
    }


def specdec(words: Sequence[str]) -> str:
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[2:])}: {done.stderr[-2000:]}")
    return done.stdout


def line(row: dict[str, Any]) -> str:
    transfers = ", ".join(f"{ms:.2f}" for ms in row["measured"])
    overruns = f"{row['overruns']:.2%}" + (" (does not count)" if row["overruns"] > 0.02 else "")
    cells = [
        *(row["rate"], f"{row['delay']:g}", transfers, row["method"]),
        *(f"{row['simulated']:.1f}", f"{row['paced']:.1f}"),
        *(f"{row['paced'] / row['simulated'] - 1:+.1%}", overruns),
        *(f"{row[key]:.0f}" for key in ("rows_bytes", "rank_bytes", "link_bytes")),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
