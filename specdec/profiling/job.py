"""``specdec profile``: measures this machine and writes a latency profile."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import yaml
from pydantic import AfterValidator, Field

from specdec.clocks import Work
from specdec.errors import UserError
from specdec.files import write_json, write_text
from specdec.pairs import HuggingFacePair, build_pair
from specdec.parts.fields import Count, expects, validated
from specdec.profiling.passes import costs_of, measure_model
from specdec.report.provenance import provenance
from specdec.report.tables import percent
from specdec.runs.progress import Progress

RESULT_FILE = "profile.json"
_PHASES = 4  # stage, prune, head, draft
_NOISY = 0.25  # spread of a stage's times above which a warning is printed


def _rises(counts: list[int]) -> list[int]:
    assert all(a < b for a, b in pairwise(counts))
    return counts


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingOptions:
    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9_-]+$"),
        expects("it must be a name of letters, digits, - and _"),
    ]
    tokens: Annotated[
        list[Count],
        Field(min_length=1),
        AfterValidator(_rises),
        expects("it must be a list of increasing whole numbers of at least 1"),
    ]
    repeats: Count
    context: Count
    transfer: bool


def as_yaml(node: Mapping[str, Any]) -> str:
    return yaml.safe_dump(node, sort_keys=False, default_flow_style=None, width=1e9)


def profile_job(cfg: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Writes NAME.yaml, the profile, and profile.json, whose content it returns."""
    options, stages = ProfilingOptions(**cfg["profiling"]), int(cfg["executor"]["stages"])
    if cfg.get("threads"):
        torch.set_num_threads(int(cfg["threads"]))
    pair = build_pair(cfg["model"])
    if not isinstance(pair, HuggingFacePair):
        raise UserError(
            f"model.kind={cfg['model']['kind']}: there is nothing to measure without models:"
            " use model=tiny, hf or random"
        )
    progress.phase("measuring", _PHASES * (options.repeats + 1) + options.transfer)
    samples = measure_model(
        pair,
        stages=stages,
        tokens=options.tokens,
        repeats=options.repeats,
        context=options.context,
        transfer=options.transfer,
        on_repeat=lambda kind: progress.advance(detail=kind),
    )
    note = (
        f"measured medians of {options.repeats} repeats; model {cfg['model']['kind']},"
        f" {pair.dtype}, {pair.num_layers} layers in {stages} stages, the longest one;"
        f" {options.context} tokens of context; {torch.get_num_threads()} threads; device"
        f" {pair.device}; transfers over gloo on loopback"
    )
    profile = {"note": note, "stages": stages, "costs": costs_of(samples)}
    head = "# Measured by `specdec profile`; milliseconds against tokens.\n"
    write_text(folder / f"{options.name}.yaml", head + as_yaml(profile))
    result = {
        "profile": {"name": options.name, **profile},
        "samples": {k.value: [s.to_json() for s in v] for k, v in samples.items()},
        "provenance": provenance(command=sys.argv, config=cfg),
    }
    write_json(folder / RESULT_FILE, result)
    return result


def profile_text(result: Mapping[str, Any]) -> str:
    curves = {k: pd.Series(c["ms"], c["tokens"]) for k, c in result["profile"]["costs"].items()}
    table = pd.DataFrame(curves).T.rename_axis("ms at tokens").reset_index()
    text = table.to_string(index=False, float_format="{:,.2f}".format, na_rep="-")
    spread = max(sample["spread"] for sample in result["samples"][Work.STAGE])
    if spread > _NOISY:
        text += (
            f"\nA stage's times scatter by up to {percent(spread)}: the machine was busy. Measure"
            " again when it is idle, or with a larger profiling.repeats."
        )
    return text
