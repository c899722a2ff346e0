"""``specdec profile``: measures a latency profile and proposes a tree and grouping for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdec.clocks import CostCurve, LatencyProfile, Work
from specdec.clocks.build import build_profile
from specdec.errors import UserError
from specdec.files import write_bytes, write_json, write_text
from specdec.pairs import HuggingFacePair
from specdec.profiling.limits import measure_machine, passes_of, roofline_png
from specdec.profiling.passes import Sample, measure_model
from specdec.profiling.proposal import Cell, Workload, costs_node, propose
from specdec.profiling.transfer import measure_transfer
from specdec.report.provenance import provenance
from specdec.report.tables import number, percent
from specdec.runs.jobs import Progress

RESULT_FILE = "profile.json"
_DIGITS = 4  # decimals of milliseconds in a profile: 0.1 microseconds
_PHASES = 4  # stage, prune, head, draft
_NOISY = 0.25  # spread of a stage's times above which a warning is printed


def profile_job(cfg: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Measures a profile, or reads that of ``profiling.use``, and proposes a tree and a grouping.

    Writes NAME.yaml (a measured profile) and profile.json (all results) into ``folder``. If
    ``profiling.use`` names a profile, the section ``use`` of ``cfg`` has its costs. Returns the
    content of profile.json.
    """
    work = Workload.of(cfg, progress)
    options = work.options
    samples: dict[Work, list[Sample]] = {}
    limits: dict[str, Any] = {}
    if options.use is not None:
        profile = build_profile({"profile": options.use, **cfg["use"]})
    else:
        samples = _measure(work, progress)
        limits = _limits(work, samples, folder)
        profile = profile_of(samples, name=options.name, note=_note(work))
        write_text(
            folder / f"{profile.name}.yaml", profile_yaml(profile, stages=cfg["executor"]["stages"])
        )
    trees = len(options.widths) * len(options.children)
    progress.phase("simulating trees", trees + sum(g > 1 for g in options.groups))
    cells = []
    for cell in propose(work, profile):
        cells.append(cell)
        progress.advance(detail=f"width {cell.width}")
    result = {
        "profile": {"name": profile.name, "note": profile.note, "costs": costs_node(profile)},
        "samples": {k.value: [s.to_json() for s in v] for k, v in samples.items()},
        "limits": limits,
        "cells": [cell.to_json() for cell in cells],
        "proposal": proposal_of(cells),
        "provenance": provenance(command=sys.argv, config=cfg),
    }
    write_json(folder / RESULT_FILE, result)
    return result


def profile_of(samples: Mapping[Work, Sequence[Sample]], *, name: str, note: str) -> LatencyProfile:
    """Builds a latency profile of the medians; kinds of work without samples cost nothing."""
    costs = {}
    for kind, of_kind in samples.items():
        ms = tuple(round(s.median_ms, _DIGITS) for s in of_kind)
        if any(ms):
            costs[kind.value] = CostCurve(tokens=tuple(s.tokens for s in of_kind), ms=ms)
    return LatencyProfile(name=name, costs=costs, note=note)


def profile_yaml(profile: LatencyProfile, *, stages: int) -> str:
    """Returns the YAML for ``clock.profile=PATH``; ``stages`` is the measured number of stages."""
    lines = ["# Measured by `specdec profile`; milliseconds against tokens."]
    lines += [f"note: {json.dumps(profile.note)}", f"stages: {stages}", "costs:"]
    for kind, node in costs_node(profile).items():
        inner = ", ".join(f"{key}: {value}" for key, value in node.items())
        lines.append(f"  {kind}: {{{inner}}}")
    return "\n".join(lines) + "\n"


def proposal_of(cells: Sequence[Cell]) -> dict[str, Any]:
    """Returns the fastest cell by the simulator and by Eq. 2, and the range of Eq. 2's error."""
    best, by_eq2 = min(cells, key=lambda c: c.tbt), min(cells, key=lambda c: c.eq2)
    simulated, eq2 = (
        {key: getattr(cell, key) for key in ("width", "children", "stages", "group", "tbt")}
        for cell in (best, by_eq2)
    )
    errors = [cell.to_json()["eq2_error"] for cell in cells]
    overrides = f"policy.width={best.width} policy.children={best.children}"
    overrides += f" executor.stages={best.stages}"
    if best.group > 1:
        overrides += f" 'executor.groups=[{','.join([str(best.group)] * best.stages)}]'"
    return {
        "simulated": simulated,
        "eq2": eq2,
        "eq2_loses": by_eq2.tbt / best.tbt - 1.0,
        "eq2_error_range": [min(errors), max(errors)],
        "overrides": overrides,
    }


def print_profile(result: Mapping[str, Any]) -> None:
    console = Console(width=120, soft_wrap=True)
    costs = result["profile"]["costs"]
    points = sorted({n for curve in costs.values() for n in curve["tokens"]})
    table = Table("ms at tokens", *map(str, points), box=None, padding=(0, 1))
    for kind, curve in costs.items():
        ms = dict(zip(curve["tokens"], curve["ms"], strict=True))
        table.add_row(kind, *(number(ms.get(n), 2) for n in points))
    console.print(table)
    if result["limits"]:
        _print_limits(result["limits"], console)
    spread = max((s["spread"] for s in result["samples"].get(Work.STAGE, ())), default=0.0)
    if spread > _NOISY:
        console.print(
            f"A stage's times scatter by up to {percent(spread)}: the machine was busy. Measure"
            " again when it is idle, or with a larger profiling.repeats.",
            highlight=False,
        )
    heads = ("width", "children", "stages", "devices/stage", "hit rate", "steps/token", "TBT ms")
    trees = Table(*heads, "Eq. 1", "Eq. 2", "PipeDec", box=None, padding=(0, 1))
    for cell in result["cells"]:
        shape = (str(cell[key]) for key in ("width", "children", "stages", "group"))
        simulated = (number(cell["steps_per_token"]), number(cell["tbt"]))
        estimates = (
            f"{number(cell[k])} ({percent(cell[f'{k}_error'])})" for k in ("eq1", "eq2", "pipedec")
        )
        trees.add_row(*shape, percent(cell["hit_rate"]), *simulated, *estimates)
    console.print(trees)
    low, high = result["proposal"]["eq2_error_range"]
    console.print(
        "TBT simulated; in brackets the equations' error against it. They take the simulated hit"
        " rate as p and leave out partial refills (SpecPipe's) or every miss (PipeDec's);"
        f" Eq. 2 is off by {percent(low)} to {percent(high)}.",
        highlight=False,
    )
    loses = result["proposal"]["eq2_loses"]
    console.print(
        f"proposed: {result['proposal']['overrides']}"
        f" (what Eq. 2 would choose is {percent(loses, 1)} slower)",
        highlight=False,
    )


def _print_limits(limits: Mapping[str, Any], console: Console) -> None:
    machine = limits["machine"]
    table = Table("pass", "rows", "MB", "MFLOPs", "ms", "least ms", "bound by", "reached", box=None)
    for work in limits["passes"]:
        table.add_row(
            *(work["kind"], str(work["rows"])),
            *(number(work["num_bytes"] / 1e6, 1), number(work["flops"] / 1e6, 1)),
            *(number(work["ms"], 2), number(work["bound_ms"], 2), work["bound"]),
            percent(work["share"]),
        )
    console.print(table)
    console.print(
        f"least ms: the longer of the pass's bytes at {machine['bytes_per_s'] / 1e9:.1f} GB/s (copy"
        f" of {machine['copy_bytes'] / 1e6:.0f} MB, read + written) and its FLOPs at"
        f" {machine['flops_per_s'] / 1e9:.1f} GFLOP/s (GEMM), both measured; roofline.png",
        highlight=False,
    )


def _limits(
    work: Workload, samples: Mapping[Work, Sequence[Sample]], folder: Path
) -> dict[str, Any]:
    """Compares the passes with the machine's measured limits, and draws ``roofline.png``."""
    pair = work.pair
    assert isinstance(pair, HuggingFacePair), "measured"
    stages, context = int(work.cfg["executor"]["stages"]), work.options.context
    passes = passes_of(pair, samples, stages=stages, context=context)
    weight = next(pair.target.parameters())
    machine = measure_machine(
        num_bytes=min(p.num_bytes for p in passes if p.kind == Work.STAGE.value),
        dtype=weight.dtype,
        device=weight.device,
    )
    write_bytes(folder / "roofline.png", roofline_png(machine, passes))
    return {"machine": asdict(machine), "passes": [p.to_json(machine) for p in passes]}


def _measure(work: Workload, progress: Progress) -> dict[Work, list[Sample]]:
    cfg, options, pair = work.cfg, work.options, work.pair
    if not isinstance(pair, HuggingFacePair):
        raise UserError(
            f"model.kind={cfg['model']['kind']}: there is nothing to measure without models: use"
            " model=tiny, hf or random, or a profile with profiling.use=NAME"
        )
    plan: dict[str, Any] = {"tokens": options.tokens, "repeats": options.repeats}
    progress.phase("measuring", _PHASES * (options.repeats + 1))
    samples = measure_model(
        pair,
        **plan,
        stages=int(cfg["executor"]["stages"]),
        context=options.context,
        on_repeat=lambda kind: progress.advance(detail=kind),
    )
    if options.transfer:
        progress.phase("measuring transfers", None)
        width = int(pair.target.config.get_text_config().hidden_size)
        dtype = next(pair.target.parameters()).dtype
        samples[Work.TRANSFER] = measure_transfer(width=width, dtype=dtype, **plan)
    return samples


def _note(work: Workload) -> str:
    cfg, options, pair = work.cfg, work.options, work.pair
    return (
        f"measured medians of {options.repeats} repeats; model {cfg['model']['kind']},"
        f" {pair.dtype}, {pair.num_layers} layers in {cfg['executor']['stages']}"
        f" stages, the longest one; {options.context} tokens of context;"
        f" {torch.get_num_threads()} threads;"
        f" device {pair.device}; transfers over gloo on loopback"
    )
