"""``specdec profile``: measures latency profiles; proposes trees, groupings and splits."""

import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from specdec.clocks import Work
from specdec.errors import UserError
from specdec.files import write_bytes, write_json, write_text
from specdec.pairs import HuggingFacePair
from specdec.profiling.limits import bounded, measure_machine, passes_of, roofline_png
from specdec.profiling.passes import Sample, costs_of, measure_model
from specdec.profiling.trees import Workload, allocate, as_yaml, clock_node, propose
from specdec.report.provenance import provenance
from specdec.report.tables import percent
from specdec.runs.progress import Progress

RESULT_FILE = "profile.json"
SPLIT_PRESET = "swiftspec_best"
_PHASES = 4  # stage, prune, head, draft
_NOISY = 0.25  # spread of a stage's times above which a warning is printed


def profile_job(cfg: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Measures a profile, or reads that of ``profiling.use`` (costs in the section ``use``), and
    proposes a tree and a grouping; writes NAME.yaml (a measured profile) and profile.json, whose
    content it returns.
    """
    work = Workload.of(cfg, progress)
    options, pair = work.options, work.pair
    samples: dict[Work, list[Sample]] = {}
    limits: dict[str, Any] = {}
    if options.use is not None:
        clock = clock_node(options.use, cfg["use"]["costs"], cfg["use"].get("note", ""))
    elif not isinstance(pair, HuggingFacePair):
        raise UserError(
            f"model.kind={cfg['model']['kind']}: there is nothing to measure without models:"
            " use model=tiny, hf or random, or a profile with profiling.use=NAME"
        )
    else:
        progress.phase("measuring", _PHASES * (options.repeats + 1) + options.transfer)
        samples = measure_model(
            pair,
            stages=work.stages,
            tokens=options.tokens,
            repeats=options.repeats,
            context=options.context,
            transfer=options.transfer,
            on_repeat=lambda kind: progress.advance(detail=kind),
        )
        limits = _limits(work, pair, samples)
        write_bytes(folder / "roofline.png", roofline_png(limits["machine"], limits["passes"]))
        note = (
            f"measured medians of {options.repeats} repeats; model {cfg['model']['kind']},"
            f" {pair.dtype}, {pair.num_layers} layers in {work.stages} stages, the longest one;"
            f" {options.context} tokens of context; {torch.get_num_threads()} threads; device"
            f" {pair.device}; transfers over gloo on loopback"
        )
        clock = clock_node(options.name, costs_of(samples), note)
        node = {"note": note, "stages": work.stages, "costs": clock["costs"]}
        head = "# Measured by `specdec profile`; milliseconds against tokens.\n"
        write_text(folder / f"{options.name}.yaml", head + as_yaml(node))
    cells = propose(work, clock)
    result = {
        "profile": {"name": clock["profile"], "note": clock["note"], "costs": clock["costs"]},
        "samples": {k.value: [s.to_json() for s in v] for k, v in samples.items()},
        "limits": limits,
        "cells": cells,
        "proposal": _proposal(cells),
        "provenance": provenance(command=sys.argv, config=cfg),
    }
    write_json(folder / RESULT_FILE, result)
    return result


def _limits(
    work: Workload, pair: HuggingFacePair, samples: Mapping[Work, Sequence[Sample]]
) -> dict[str, Any]:
    passes = passes_of(pair, samples, stages=work.stages, context=work.options.context)
    weight = next(pair.target.parameters())
    size = min(work["num_bytes"] for work in passes if work["kind"] == Work.STAGE)
    machine = measure_machine(num_bytes=size, dtype=weight.dtype, device=weight.device)
    return {"machine": machine, "passes": [bounded(work, machine) for work in passes]}


def _proposal(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    best, by_eq2 = (min(cells, key=itemgetter(key)) for key in ("tbt", "eq2"))
    keys = ("width", "children", "stages", "group", "tbt")
    errors = [cell["eq2_error"] for cell in cells]
    text = "policy.width={width} policy.children={children} executor.stages={stages}"
    overrides, group = text.format(**best), best["group"]
    if group > 1:
        overrides += f" 'executor.groups=[{','.join([str(group)] * best['stages'])}]'"
    return {
        "simulated": {key: best[key] for key in keys},
        "eq2": {key: by_eq2[key] for key in keys},
        "eq2_loses": by_eq2["tbt"] / best["tbt"] - 1.0,
        "eq2_error_range": [min(errors), max(errors)],
        "overrides": overrides,
    }


def allocation_job(cfg: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Writes profile.json (all splits), whose content it returns, and strategy/swiftspec_best.yaml
    (the best).
    """
    work = Workload.of(cfg, progress)
    options = work.options
    use = None if options.use is None else {"name": options.use, **cfg["use"]}
    splits = allocate(work, use)
    best = max(splits, key=itemgetter("tokens_per_s"))
    source = "measured on real ranks" if use is None else f"simulated on {options.use}"
    parts = {"source": "draft_model", "policy": "swiftspec", "verifier": "match"}
    parts["executor"] = "tensor_parallel"
    title = "SwiftSpec, {target} devices for the target and {draft} for the draft".format(**best)
    preset = {
        "defaults": [{f"override /{part}": option} for part, option in parts.items()],
        "strategy": {"name": SPLIT_PRESET, "title": title, "kind": "parts", "baseline": False},
        "policy": {key: best[key] for key in ("bs", "w", "d")},
        "executor": {f"{part}_degree": best[part] for part in ("target", "draft")},
    }
    head = f"The fastest of {len(splits)} splits and trees, {source}, by `specdec profile`."
    text = f"# @package _global_\n# {head}\n{as_yaml(preset)}"
    write_text(folder / "strategy" / f"{SPLIT_PRESET}.yaml", text)
    result = {"source": source, "splits": splits, "best": best}
    result["provenance"] = provenance(command=sys.argv, config=cfg)
    write_json(folder / RESULT_FILE, result)
    return result


def profile_text(result: Mapping[str, Any]) -> str:
    curves = {k: pd.Series(c["ms"], c["tokens"]) for k, c in result["profile"]["costs"].items()}
    lines = [_table(pd.DataFrame(curves).T.rename_axis("ms at tokens").reset_index())]
    if limits := result["limits"]:
        passes, machine = pd.DataFrame(limits["passes"]), limits["machine"]
        passes[["num_bytes", "flops"]] /= 1e6
        heads = {"kind": "pass", "num_bytes": "MB", "flops": "MFLOPs"}
        heads |= {"bound_ms": "least ms", "bound": "bound by", "share": "reached"}
        lines.append(_table(passes.rename(columns=heads)))
        lines.append(
            f"least ms: the longer of the pass's bytes at {machine['bytes_per_s'] / 1e9:.1f} GB/s"
            f" (copy of {machine['copy_bytes'] / 1e6:.0f} MB, read + written) and its FLOPs at"
            f" {machine['flops_per_s'] / 1e9:.1f} GFLOP/s (GEMM), both measured; reached: its share"
            " of the measured time; roofline.png"
        )
    spread = max((s["spread"] for s in result["samples"].get(Work.STAGE, ())), default=0.0)
    if spread > _NOISY:
        lines.append(
            f"A stage's times scatter by up to {percent(spread)}: the machine was busy. Measure"
            " again when it is idle, or with a larger profiling.repeats."
        )
    heads = {"group": "devices/stage", "hit_rate": "hit rate", "steps_per_token": "steps/token"}
    heads |= {"tbt": "TBT ms", "eq1": "Eq. 1", "eq2": "Eq. 2", "pipedec": "PipeDec"}
    heads |= {f"{key}_error": "off" for key in ("eq1", "eq2", "pipedec")}
    tree = ["width", "children", "stages", "group", "hit_rate", "steps_per_token", "tbt"]
    estimates = ["eq1", "eq1_error", "eq2", "eq2_error", "pipedec", "pipedec_error"]
    lines.append(_table(pd.DataFrame(result["cells"])[tree + estimates].rename(columns=heads)))
    proposal = result["proposal"]
    low, high = proposal["eq2_error_range"]
    lines += [
        "TBT simulated; off: the equations' error against it. They take the simulated hit rate as p"
        " and leave out partial refills (SpecPipe's) or every miss (PipeDec's);"
        f" Eq. 2 is off by {percent(low)} to {percent(high)}.",
        f"proposed: {proposal['overrides']} (what Eq. 2 would choose is"
        f" {percent(proposal['eq2_loses'], 1)} slower)",
    ]
    return "\n".join(lines)


def splits_text(result: Mapping[str, Any]) -> str:
    splits = pd.DataFrame(result["splits"]).sort_values("tokens_per_s", ascending=False)
    degrees = splits.target.astype(str) + ":" + splits.draft.astype(str)
    splits["target:draft"] = degrees + splits.interpolated.map({True: "*", False: ""})
    heads = {"target_ms": "t target", "draft_ms": "t draft", "acceptance_length": "accepted"}
    columns = ["target:draft", "bs", "w", "d", *heads, "tokens_per_s"]
    table = _table(splits[columns].rename(columns={**heads, "tokens_per_s": "tokens/s"}))
    between = "; * a degree between two of the profile's" if splits.interpolated.any() else ""
    source = f"{result['source']}; accepted: emitted tokens per target pass{between}"
    best = "best: {target}:{draft}, bs {bs}, w {w}, d {d}".format(**result["best"])
    return "\n".join([table, source, best])


def _table(frame: pd.DataFrame) -> str:
    known = frame.replace({None: np.nan})
    return known.to_string(index=False, justify="right", float_format="{:,.2f}".format, na_rep="-")
