"""``specdec profile profiling.devices=K``: tries device splits and writes the best as a preset."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.files import write_json, write_text
from specdec.profiling.allocation import Split, allocate, preset
from specdec.profiling.job import RESULT_FILE
from specdec.profiling.options import ProfilingOptions
from specdec.report.provenance import provenance
from specdec.report.tables import number
from specdec.runs.jobs import Progress, prepare, stop_rules

if TYPE_CHECKING:
    from rich.console import Console

BEST = "swiftspec_best"
"""Name of the written preset."""


def allocation_job(cfg: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Tries device splits and trees.

    Args:
        cfg: resolved configuration with the section ``profiling`` and, if ``profiling.use`` names
            a profile, the section ``use`` with its costs.
        folder: for profile.json (every split) and strategy/swiftspec_best.yaml (the best one).
        progress: advanced after every split.

    Returns:
        The content of ``profile.json``.

    Raises:
        UserError: as ``allocate``.
    """
    options = ProfilingOptions(**cfg["profiling"])
    assert options.devices is not None, "without devices, `profile_job` runs"
    if cfg.get("threads"):
        torch.set_num_threads(int(cfg["threads"]))
    progress.phase("loading models", None)
    pair, prompts, _ = prepare(cfg)
    choices = {"targets": options.targets, "sizes": options.bs, "leaves": options.w}
    use = None if options.use is None else {"name": options.use, **cfg["use"]}
    runs = prod(map(len, choices.values())) * (1 if use is None else 2)
    progress.phase("trying splits", runs)
    splits = allocate(
        cfg,
        pair,
        prompts,
        stop_rules(cfg, pair),
        devices=options.devices,
        **choices,
        use=use,
        on_split=lambda s: progress.advance(detail=f"{s.target}:{s.draft}, d {s.d}"),
    )
    best = max(splits, key=lambda split: split.tokens_per_s)
    source = "measured on real ranks" if use is None else f"simulated on {options.use}"
    about = f"The fastest of {len(splits)} splits and trees, {source}, by `specdec profile`."
    write_text(folder / "strategy" / f"{BEST}.yaml", preset(best, name=BEST, about=about))
    result = {
        "source": source,
        "splits": [asdict(split) for split in splits],
        "best": asdict(best),
        "provenance": provenance(command=sys.argv, config=cfg),
    }
    write_json(folder / RESULT_FILE, result)
    return result


def print_splits(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the table of splits, fastest first, and the best."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    heads = ("target:draft", "bs", "w", "d", "t target", "t draft", "accepted", "tokens/s")
    table = Table(*heads, box=None, padding=(0, 1))
    for split in sorted(result["splits"], key=lambda s: -s["tokens_per_s"]):
        mark = "*" if split["interpolated"] else ""
        times = (split["target_ms"], split["draft_ms"])
        table.add_row(
            f"{split['target']}:{split['draft']}{mark}",
            *(str(split[key]) for key in ("bs", "w", "d")),
            *("-" if ms is None else number(ms, 2) for ms in times),
            number(split["acceptance_length"], 2),
            number(split["tokens_per_s"], 1),
        )
    console.print(table)
    interpolated = any(split["interpolated"] for split in result["splits"])
    best = Split(**result["best"])
    console.print(
        f"{result['source']}; accepted: emitted tokens per target pass"
        + ("; * a degree between two of the profile's" if interpolated else ""),
        highlight=False,
    )
    console.print(
        f"best: {best.target}:{best.draft}, bs {best.bs}, w {best.w}, d {best.d}", highlight=False
    )
