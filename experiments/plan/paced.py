"""Is the first choice of a plan the fastest on a paced cluster, over processes?

    python -m experiments.plan.paced OUTPUT_DIR [--only four_stages] [--quick] [--write]

For three clusters (four stages, eight stages, two groups of devices; a transfer takes 0.1, 1 and
5 ms) a plan is made with the cluster's profile and the record of the bundled pair. Its four best
presets, three others and plain decoding then run with ``clock=paced``, a process per device, on the
prompts of the record: the passes take the profile's times, and messages, controller and waits are
real. Prints planned and paced time per token of each, and the regret of the first choice: its time
over that of the best of the eight. The profile is stretched by ``clock.scale``, since nine
processes share few cores; a run with more than 2 % of overruns does not count. ``--write`` also
writes the table to results/paced.md beside this file. Needs a machine without other work; continues
after an interruption.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.reproduce.rendering import grid
from specdec.cli.main import main as command
from specdec.files import write_json, write_text
from specdec.planning.answer import PRESET, write_parts
from specdec.planning.candidates import PLAIN, Candidate, Times
from specdec.planning.job import plan_request, searched
from specdec.planning.search import Search
from specdec.report.provenance import provenance
from specdec.runs.progress import Progress

_HERE = Path(__file__).parent
RESULT = "paced.json"
BEST, OTHERS = 4, 3
_PROMPTS, _TOKENS = 4, 64
HEADINGS = ("cluster", "choice", "layout", "planned ms per token", "paced", "error", "overruns")
_OVERRUNS = 0.02  # share of a run's pieces of work, above which it does not count


@dataclass(frozen=True, slots=True)
class Cluster:
    """A profile (name or path), devices with the draft's, milliseconds of a transfer, and
    ``clock.scale`` of the runs."""

    profile: str
    devices: int
    link_ms: float
    scale: float


CLUSTERS: Mapping[str, Cluster] = {
    "four_stages": Cluster(str(_HERE / "clusters" / "four_stages.yaml"), 5, 0.1, 6.0),
    "eight_stages": Cluster("specpipe_8x3090", 9, 1.0, 4.0),
    "two_groups": Cluster("swiftspec_table6", 2, 5.0, 15.0),
}


def workload(quick: bool) -> list[str]:
    """Words of the command line that plan and runs share."""
    prompts, tokens = (1, 24) if quick else (_PROMPTS, _TOKENS)
    words = ["model=tiny", "data=humaneval", "sampling=t06", "threads=1"]
    return [*words, f"data.limit={prompts}", f"max_new_tokens={tokens}"]


def tried(search: Search, finalists: Sequence[Candidate], quick: bool) -> list[Candidate]:
    """The fastest candidates of different presets, others, and plain decoding."""
    ranked = search.ranked(finalists, search.chosen.prompts)
    firsts: dict[str, Candidate] = {}
    for candidate in ranked:
        firsts.setdefault(candidate.name, candidate)
    plain = firsts.pop(PLAIN)
    best = list(firsts.values())
    if quick:
        return [best[0], plain]
    others = best[BEST:][-OTHERS:]
    sizes = [made for made in ranked if made not in (*best, plain)]  # where presets are few
    missing = BEST + OTHERS - len(best[:BEST]) - len(others)
    return [*best[:BEST], *others, *sizes[:missing], plain]


def run_paced(made: Candidate, cluster: Cluster, folder: Path, quick: bool) -> dict[str, Any]:
    """The row of a candidate; the run folder keeps a finished run."""
    if not (folder / "run" / "summary.json").is_file():
        write_parts(folder, made, 0.0)
        words = [
            *("run", "--config-dir", str(folder), f"strategy={PRESET}", *workload(quick)),
            *("clock=paced", f"clock.profile={PRESET}", f"clock.scale={cluster.scale}"),
            f"output_dir={folder / 'run'}",
        ]
        if "transport" in made.config["executor"]:
            words.append("executor.transport=distributed")
        with redirect_stdout(io.StringIO()):
            status = command(words)
        if status:
            raise SystemExit(f"{made} on {made.layout} failed: see {folder}")
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    row = {"strategy": made.name, "sizes": dict(made.sizes), "layout": str(made.layout)}
    row["paced_ms"] = summary["tbt_ms_mean"] / cluster.scale
    return {**row, **{key: summary[key] for key in ("overrun_share", "loop_share")}}


def run_cluster(name: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Planned and paced times of the candidates of a cluster."""
    cluster = CLUSTERS[name]
    shape = {"devices": cluster.devices, "link_ms": cluster.link_ms}
    words = [f"profile={cluster.profile}", *(f"{k}={v}" for k, v in shape.items()), "budget_s=60"]
    (folder / "plan").mkdir(parents=True, exist_ok=True)
    request = plan_request([*workload(quick), *words])
    search, _, finalists = searched(request, folder / "plan", Progress())
    rows = []
    for at, made in enumerate(tried(search, finalists, quick)):
        ms = 1e3 * Times.of(search.units(made, _PROMPTS), "latency").mean
        row = run_paced(made, cluster, folder / f"{at}-{made.name}", quick)
        rows.append({"planned_ms": ms, **row})
        print(*cells(rows[-1]), sep=", ", flush=True)
    about = {"profile": Path(cluster.profile).stem, **shape, "scale": cluster.scale}
    return {"cluster": about, "rows": rows}


def regret(result: Mapping[str, Any]) -> float:
    """Paced time of the first choice over that of the best, less 1."""
    times = [row["paced_ms"] for row in result["rows"]]
    return float(times[0] / min(times) - 1.0)


def error(row: Mapping[str, Any]) -> float:
    """Of the planned time per token, relative to the paced one."""
    return float(row["planned_ms"] / row["paced_ms"] - 1.0)


def cells(row: Mapping[str, Any]) -> list[str]:
    sizes = " ".join(f"{key}={value}" for key, value in row["sizes"].items())
    times = (f"{row[f'{kind}_ms']:.2f}" for kind in ("planned", "paced"))
    shares = (f"{100 * error(row):+.1f} %", f"{100 * row['overrun_share']:.2f} %")
    return [f"{row['strategy']} {sizes}", row["layout"], *times, *shares]


def table(stored: Mapping[str, Any]) -> str:
    revision = str(stored["provenance"].get("git", {}).get("revision", "unknown"))[:12]
    clusters = stored["clusters"]
    lines = [
        "# The choices of plans on paced clusters\n",
        f"`python -m experiments.plan.paced DIR --write`, revision {revision}; a process per"
        f" device, {' '.join(stored['workload'])}.\n",
        *grid(HEADINGS, [[n, *cells(row)] for n in clusters for row in clusters[n]["rows"]]),
    ]
    return "\n".join([*lines, "", *(summary(*entry) for entry in clusters.items())]) + "\n"


def summary(name: str, result: Mapping[str, Any]) -> str:
    """Regret of the first choice, and how many planned times are near the paced ones."""
    kept = [row for row in result["rows"] if row["overrun_share"] <= _OVERRUNS]
    near = sum(abs(error(row)) <= 0.1 for row in kept)
    return (
        f"{name}: regret {100 * regret(result):.1f} %, {near} of {len(kept)} within 10 %,"
        f" {len(result['rows']) - len(kept)} with too many overruns"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--only", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--quick", action="store_true", help="one prompt, two candidates")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / RESULT
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"clusters": {}}
    for name in args.only:
        print(f"{name}:", flush=True)
        if name in stored["clusters"]:
            for row in stored["clusters"][name]["rows"]:
                print(*cells(row), sep=", ")
        else:
            stored["clusters"][name] = run_cluster(name, args.output_dir / name, args.quick)
            stored["provenance"] = provenance(command=["experiments.plan.paced"], config={})
            stored["workload"] = workload(args.quick)
            write_json(path, stored)
        print(summary(name, stored["clusters"][name]), flush=True)
    if args.write:
        write_text(_HERE / "results" / "paced.md", table(stored))


if __name__ == "__main__":
    main()
