"""Predicted order and ratios beside PipeSpec's published runs.

    python -m experiments.plan.published [--write]

Each run is simulated as a candidate of a plan, with the law of its own pair and the times of
passes of plain decoding and synchronous runs. Prints a table; ``--write`` also writes it to
results/published.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from specdec.config.hydra import compose_config
from specdec.config.profiles import load_profile
from specdec.files import write_text
from specdec.planning.acceptance import OfLaw
from specdec.planning.candidates import PLAIN, families, with_size
from specdec.planning.layouts import Layout
from specdec.planning.machines import Profiled
from specdec.planning.search import Times
from specdec.planning.simulate import Simulator
from specdec.report.provenance import provenance

_HERE = Path(__file__).parent
_PROMPTS, _TOKENS = 24, 128


def law_of(name: str) -> OfLaw:
    """A shipped law."""
    return OfLaw.of(compose_config([f"model={name}"]).values["model"])


def predicted(run: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[float, float]:
    """(milliseconds per token of plain decoding, of the run)."""
    costs = load_profile("pipespec_70b")["costs"]
    used = {"stage": costs[target["stage"]], "draft": costs[run["draft"]]}
    law = law_of(run["law"])
    if "middle" in run:
        used["middle"] = costs["middle"]
        # The middle model's hit rate, in the classes of the draft's law.
        odds = np.linspace(0.0, 3.0, 61)
        wanted = law_of(run["middle"]).hit_rate()
        near = min(odds, key=lambda x: abs(law.shifted(float(x)).hit_rate() - wanted))
        top1 = law.shifted(float(near)).section["top1"]
        law = OfLaw.of({**law.section, "middle_top1": top1}, law.told)
    machine = Profiled(name="pipespec_70b", profile={"costs": used, "stages": 1}, devices=3)
    pair = law.pair()
    found, _ = families(law.words, [], [run["strategy"]], pair)
    simulator = Simulator(pair, None, of="published", prompts=_PROMPTS)
    times = []
    for name, sizes in ((PLAIN, {}), (run["strategy"], run["sizes"])):
        family = next(family for family in found if family.name == name)
        candidate = family.candidate(machine, Layout(), batch=1, context=1)
        for key, value in sizes.items():
            candidate = with_size(candidate, key, value)
        units = simulator.units(candidate, _PROMPTS, _TOKENS)
        times.append(1e3 * Times.of(units, "latency", 1).mean)
    return times[0], times[1]


def table() -> str:
    """The table of all runs, with the errors."""
    asked = yaml.safe_load((_HERE / "published.yaml").read_text(encoding="utf-8"))
    lines = [
        "| target | run | published | predicted | error | predicted ms per token |",
        "|---|---|---|---|---|---|",
    ]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for run in asked["runs"]:
        target = asked["targets"][run["target"]]
        plain, here = predicted(run, target)
        ratio = plain / here
        pairs.setdefault(run["target"], []).append((run["published"], ratio))
        lines.append(
            f"| {run['target']} | {run['name']} | {run['published']:.2f}x | {ratio:.2f}x |"
            f" {100 * (ratio / run['published'] - 1):+.0f} % | {here:.1f} |"
        )
    two = [(a, b) for of in pairs.values() for a in of for b in of if a[0] < b[0]]
    ordered, total = sum(a[1] < b[1] for a, b in two), len(two)
    lines += ["", f"Order: {ordered} of {total} pairs of runs of one target as published."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    text = table()
    print(text)
    if args.write:
        of = provenance(command=sys.argv, config={})
        head = (
            "# PipeSpec's published runs, as a plan predicts them\n\n"
            "Simulated with laws and times of the same authors' runs. Over plain decoding.\n"
            "`python -m experiments.plan.published --write`, revision"
            f" {str(of.get('git', {}).get('revision', 'unknown'))[:12]}.\n\n"
        )
        write_text(_HERE / "results" / "published.md", head + text)


if __name__ == "__main__":
    main()
