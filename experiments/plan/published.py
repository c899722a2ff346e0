"""Predicted order and ratios beside published runs of PipeSpec and SPD.

    python -m experiments.plan.published [--write]

Each run is simulated as ``specdec plan`` simulates its candidates. PipeSpec's runs use the law of
their own pair, and pass times from its plain and synchronous runs. SPD's runs use the hit rate that
follows from the published tokens per cycle, and the published time of a cycle. Prints two tables;
``--write`` also writes them to results/published.md beside this file. FlowSpec is left out: it
publishes neither pass times nor plain decoding, and the data have no acceptance of its pair.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.special import expit, logit

from specdec.config.hydra import compose_config
from specdec.config.profiles import load_profile
from specdec.files import write_text
from specdec.planning.acceptance import Acceptance, of_law
from specdec.planning.candidates import PLAIN, Simulator, Times, presets
from specdec.planning.machines import Layout, Profiled
from specdec.report.provenance import provenance

_HERE = Path(__file__).parent
_PROMPTS, _TOKENS = 24, 128


def law_of(name: str) -> Acceptance:
    """A shipped law."""
    return of_law(compose_config([f"model={name}"]).values["model"])


def predicted(run: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[float, float]:
    """(milliseconds per token of plain decoding, of the run)."""
    costs = load_profile("pipespec_70b")["costs"]
    used = {"stage": costs[target["stage"]], "draft": costs[run["draft"]]}
    law = law_of(run["law"])
    if "middle" in run:
        used["middle"] = costs["middle"]
        # The middle model's hit rate, in the classes of the draft's law.
        odds = logit(np.asarray(law.section["top1"], float))
        wanted = law_of(run["middle"]).hit_rate
        moved = [expit(odds + by).tolist() for by in np.linspace(0.0, 3.0, 61)]
        laws = [of_law({**law.section, "top1": top1}) for top1 in moved]
        near = min(laws, key=lambda middle: abs(middle.hit_rate - wanted))
        law = of_law({**law.section, "middle_top1": near.section["top1"]}, law.label)
    machine = Profiled(name="pipespec_70b", stages=1, by_batch={1: used}, devices=3)
    plain = simulated_ms(law, machine, PLAIN, {}, Layout())
    return plain, simulated_ms(law, machine, run["strategy"], run["sizes"], Layout())


def simulated_ms(
    law: Acceptance, machine: Profiled, name: str, sizes: Mapping[str, Any], layout: Layout
) -> float:
    found, _ = presets(law.overrides, [], [name], law.pair)
    preset = next(preset for preset in found if preset.name == name)
    candidate = preset.on(machine, layout, batch=1, context=1)
    for key, value in sizes.items():
        candidate = candidate.with_size(key, value)
    simulator = Simulator(law.pair, prompts=_PROMPTS)
    units = simulator.units(candidate, _PROMPTS, _TOKENS)
    return 1e3 * Times.of(units, "latency").mean


def predicted_cycle(pipeline: Mapping[str, Any], theory: float) -> float:
    """Milliseconds per token of a pipeline that is fed one draft token per cycle.

    The hit rate p is that of ``theory`` tokens in the time of ``stages`` cycles, where a hit takes
    one cycle and a miss all of them: ``theory = stages / (p + (1 - p) stages)``.
    """
    stages = int(pipeline["stages"])
    hit = (stages - stages / theory) / (stages - 1)
    law = of_law({"weights": [1.0], "top1": [hit], "decay": [2.0], "miss": [0.0]})
    times = {"stage": pipeline["cycle_ms"], "draft": pipeline["draft_ms"]}
    costs = {kind: {"tokens": [1], "ms": [ms]} for kind, ms in times.items()}
    machine = Profiled(name="spd", stages=stages, by_batch={1: costs}, devices=stages + 1)
    sizes = {"width": 1, "children": 1}
    return simulated_ms(law, machine, "pipedec", sizes, Layout(stages=stages, own_draft=True))


def cycle_table(asked: Mapping[str, Any]) -> str:
    lines = [
        "| stages | prompts | published | predicted | error |",
        "|---|---|---|---|---|",
    ]
    pairs = []
    for pipeline in asked["pipelines"]:
        for name, run in pipeline["runs"].items():
            ratio = 1e3 * asked["plain_s"] / predicted_cycle(pipeline, run["theory"])
            pairs.append((run["published"], ratio))
            lines.append(
                f"| {pipeline['stages']} | {name} | {run['published']:.2f}x | {ratio:.2f}x |"
                f" {100 * (ratio / run['published'] - 1):+.0f} % |"
            )
    return "\n".join([*lines, "", order(pairs)]) + "\n"


def order(*groups: Sequence[tuple[float, float]]) -> str:
    """How many pairs of runs of each group are predicted in the published order."""
    two = [(a, b) for of in groups for b in of for a in of if a[0] < b[0]]
    ordered = sum(a[1] < b[1] for a, b in two)
    return f"Order: {ordered} of {len(two)} pairs of runs of one target as published."


def table(asked: Mapping[str, Any]) -> str:
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
    return "\n".join([*lines, "", order(*pairs.values())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    asked = yaml.safe_load((_HERE / "published.yaml").read_text(encoding="utf-8"))
    text = f"{table(asked)}\n## SPD\n\n{cycle_table(asked['spd'])}"
    print(text)
    if args.write:
        of = provenance(command=sys.argv, config={})
        head = (
            "# Published runs, as a plan predicts them\n\n"
            "Simulated with laws, hit rates and times of the same authors' runs. Over plain"
            " decoding.\n"
            "`python -m experiments.plan.published --write`, revision"
            f" {str(of.get('git', {}).get('revision', 'unknown'))[:12]}.\n\n## PipeSpec\n\n"
        )
        write_text(_HERE / "results" / "published.md", head + text)


if __name__ == "__main__":
    main()
