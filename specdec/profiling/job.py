"""The job of ``specdec profile``: measure, write the profile, propose, write and print the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.clocks import CostCurve, LatencyProfile, Work
from specdec.clocks.build import build_profile
from specdec.errors import UserError
from specdec.files import write_json, write_text
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.profiling.passes import Sample, measure_model
from specdec.profiling.proposal import Cell, curve_node, propose
from specdec.profiling.transfer import measure_transfer
from specdec.report.provenance import provenance
from specdec.report.tables import number, percent
from specdec.runs.jobs import Progress, prepare, stop_rules

if TYPE_CHECKING:
    from rich.console import Console

RESULT_FILE = "profile.json"
_DIGITS = 4  # of milliseconds: 0.1 microseconds
_PHASES = 4  # stage, prune, head, draft
_NOISY = 0.25  # spread of a stage's times from which the machine was not idle


def profile_job(cfg: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Measures (or takes) a profile and proposes a tree and a grouping for it.

    Args:
        cfg: resolved configuration with the section ``profiling`` and, where ``profiling.use``
            names a profile, ``use`` with its costs.
        folder: gets NAME.yaml, the profile; profile.json, every measurement and proposal.
        progress: told of every repeat and every simulated tree.

    Returns:
        The content of ``profile.json``.

    Raises:
        UserError: nothing to measure, or a grouping that does not divide the devices.
    """
    section = cfg["profiling"]
    if cfg.get("threads"):
        torch.set_num_threads(int(cfg["threads"]))
    progress.phase("loading models", None)
    pair, prompts, _ = prepare(cfg)
    samples: dict[Work, list[Sample]] = {}
    profile = _given(cfg)
    if profile is None:
        samples = _measure(cfg, pair, progress)
        profile = profile_of(samples, name=section["name"], note=_note(cfg, pair))
        write_text(
            folder / f"{profile.name}.yaml", profile_yaml(profile, stages=cfg["executor"]["stages"])
        )
    trees = len(section["widths"]) * len(section["children"])
    progress.phase("simulating trees", trees + sum(g > 1 for g in section["groups"]))
    cells = propose(
        cfg,
        pair,
        prompts,
        stop_rules(cfg, pair),
        profile,
        widths=section["widths"],
        children=section["children"],
        groups=section["groups"],
        on_cell=lambda cell: progress.advance(detail=f"width {cell.width}"),
    )
    found = {
        "profile": {"name": profile.name, "note": profile.note, "costs": _costs(profile)},
        "samples": {k.value: [_sample_json(s) for s in v] for k, v in samples.items()},
        "cells": [cell.to_json() for cell in cells],
        "proposal": proposal_of(cells),
        "provenance": provenance(command=sys.argv, config=cfg),
    }
    write_json(folder / RESULT_FILE, found)
    return found


def profile_of(samples: Mapping[Work, Sequence[Sample]], *, name: str, note: str) -> LatencyProfile:
    """A latency profile of measured medians; kinds that were not measured cost nothing."""
    costs = {
        kind.value: CostCurve(
            tokens=tuple(s.tokens for s in found),
            ms=tuple(round(s.median_ms, _DIGITS) for s in found),
        )
        for kind, found in samples.items()
        if any(round(s.median_ms, _DIGITS) for s in found)
    }
    return LatencyProfile(name=name, costs=costs, note=note)


def profile_yaml(profile: LatencyProfile, *, stages: int) -> str:
    """The file that ``clock.profile=PATH`` reads; ``stages``: of the pipeline that was measured."""
    lines = ["# Measured by `specdec profile`; milliseconds against tokens."]
    lines += [f"note: {json.dumps(profile.note)}", f"stages: {stages}", "costs:"]
    for kind, node in _costs(profile).items():
        inner = ", ".join(f"{key}: {value}" for key, value in node.items())
        lines.append(f"  {kind}: {{{inner}}}")
    return "\n".join(lines) + "\n"


def proposal_of(cells: Sequence[Cell]) -> dict[str, Any]:
    """What the simulator and what Eq. 2 would choose, and how far the equations are off."""
    best, by_eq2 = min(cells, key=lambda c: c.tbt), min(cells, key=lambda c: c.eq2)
    errors = [cell.eq2_error for cell in cells]
    return {
        "simulated": _tree_json(best),
        "eq2": _tree_json(by_eq2),
        "eq2_loses": by_eq2.tbt / best.tbt - 1.0,
        "eq2_error_range": [min(errors), max(errors)],
        "overrides": " ".join(_overrides(best)),
    }


def _overrides(cell: Cell) -> list[str]:
    """The cell as words of the command line."""
    words = [f"policy.width={cell.width}", f"policy.children={cell.children}"]
    words.append(f"executor.stages={cell.stages}")
    if cell.group > 1:
        words.append(f"'executor.groups={[cell.group] * cell.stages}'".replace(" ", ""))
    return words


def print_profile(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the profile's curves, the trees tried and the proposal."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console(width=120, soft_wrap=True)
    costs = found["profile"]["costs"]
    points = sorted({n for curve in costs.values() for n in curve["tokens"]})
    table = Table("ms at tokens", *map(str, points), box=None, padding=(0, 1))
    for kind, curve in costs.items():
        ms = dict(zip(curve["tokens"], curve["ms"], strict=True))
        table.add_row(kind, *(number(ms.get(n), 2) for n in points))
    console.print(table)
    spread = max((s["spread"] for s in found["samples"].get(Work.STAGE, ())), default=0.0)
    if spread > _NOISY:
        console.print(
            f"A stage's times scatter by up to {percent(spread)}: the machine was busy. Measure"
            " again when it is idle, or with a larger profiling.repeats.",
            highlight=False,
        )
    heads = ("width", "children", "stages", "devices/stage", "hit rate", "steps/token", "TBT ms")
    trees = Table(*heads, "Eq. 1", "Eq. 2", "PipeDec", box=None, padding=(0, 1))
    for cell in found["cells"]:
        shape = (str(cell[key]) for key in ("width", "children", "stages", "group"))
        simulated = (number(cell["steps_per_token"]), number(cell["tbt"]))
        estimates = (
            f"{number(cell[k])} ({percent(cell[f'{k}_error'])})" for k in ("eq1", "eq2", "pipedec")
        )
        trees.add_row(*shape, percent(cell["hit_rate"]), *simulated, *estimates)
    console.print(trees)
    low, high = found["proposal"]["eq2_error_range"]
    console.print(
        "TBT simulated; in brackets the equations' error against it. They take the simulated hit"
        " rate as p and leave out partial refills (SpecPipe's) or every miss (PipeDec's);"
        f" Eq. 2 is off by {percent(low)} to {percent(high)}.",
        highlight=False,
    )
    loses = found["proposal"]["eq2_loses"]
    console.print(
        f"proposed: {found['proposal']['overrides']}"
        f" (what Eq. 2 would choose is {percent(loses, 1)} slower)",
        highlight=False,
    )


def _given(cfg: Mapping[str, Any]) -> LatencyProfile | None:
    """The profile that ``profiling.use`` names; None where one is to be measured."""
    name = cfg["profiling"]["use"]
    return None if name is None else build_profile({"profile": name, **cfg["use"]})


def _measure(
    cfg: Mapping[str, Any], pair: ModelPair, progress: Progress
) -> dict[Work, list[Sample]]:
    section = cfg["profiling"]
    if not isinstance(pair, HuggingFacePair):
        raise UserError(
            "there is nothing to measure without models: use model=tiny, hf or random, or name a"
            " profile with profiling.use=NAME"
        )
    repeats, tokens = section["repeats"], section["tokens"]
    progress.phase("measuring", _PHASES * (repeats + 1))
    samples = measure_model(
        pair,
        stages=int(cfg["executor"]["stages"]),
        tokens=tokens,
        repeats=repeats,
        context=section["context"],
        on_repeat=lambda kind: progress.advance(detail=kind),
    )
    if section["transfer"]:
        progress.phase("measuring transfers", None)
        config = pair.target.config.get_text_config()
        dtype = next(pair.target.parameters()).dtype
        samples[Work.TRANSFER] = measure_transfer(
            width=int(config.hidden_size), dtype=dtype, tokens=tokens, repeats=repeats
        )
    return samples


def _note(cfg: Mapping[str, Any], pair: ModelPair) -> str:
    """Under which conditions the figures hold."""
    section, model = cfg["profiling"], cfg["model"]
    dtype = model.get("dtype")
    return (
        f"measured medians of {section['repeats']} repeats; model {model['kind']}, {dtype},"
        f" {pair.num_layers} layers in {cfg['executor']['stages']} stages, the longest one;"
        f" {section['context']} tokens of context; {torch.get_num_threads()} threads;"
        f" device {getattr(pair, 'device', 'cpu')}; transfers over gloo on loopback"
    )


def _costs(profile: LatencyProfile) -> dict[str, Any]:
    return {kind: curve_node(curve) for kind, curve in profile.costs.items()}


def _sample_json(sample: Sample) -> dict[str, Any]:
    return {
        "tokens": sample.tokens,
        "median_ms": sample.median_ms,
        "spread": sample.spread,
        "ms": list(sample.ms),
    }


def _tree_json(cell: Cell) -> dict[str, Any]:
    return {key: getattr(cell, key) for key in ("width", "children", "stages", "group", "tbt")}
