"""The job of ``specdec profile profiling.devices=K``: try splits, print, write the best."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.files import write_json, write_text
from specdec.profiling.allocation import Choices, Split, allocate, preset
from specdec.profiling.job import RESULT_FILE
from specdec.report.provenance import provenance
from specdec.report.tables import number
from specdec.runs.jobs import Progress, prepare, stop_rules

if TYPE_CHECKING:
    from rich.console import Console

BEST = "swiftspec_best"
"""Name of the preset that is written."""


def allocation_job(cfg: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Tries splits of the devices and trees on them.

    Args:
        cfg: resolved configuration with the section ``profiling`` and, where ``profiling.use``
            names a profile, ``use`` with its costs.
        folder: gets profile.json, every split; strategy/swiftspec_best.yaml, the best as a preset.
        progress: told of every split.

    Returns:
        The content of ``profile.json``.

    Raises:
        UserError: see ``allocate``.
    """
    section = cfg["profiling"]
    if cfg.get("threads"):
        torch.set_num_threads(int(cfg["threads"]))
    progress.phase("loading models", None)
    pair, prompts, _ = prepare(cfg)
    choices = Choices(
        devices=section["devices"],
        targets=tuple(section["targets"]),
        sizes=tuple(section["bs"]),
        leaves=tuple(section["w"]),
    )
    use = None if section["use"] is None else {"name": section["use"], **cfg["use"]}
    runs = len(choices.trees) * (1 if use is None else 2)
    progress.phase("trying splits", runs)
    splits = allocate(
        cfg,
        pair,
        prompts,
        stop_rules(cfg, pair),
        choices,
        use=use,
        on_split=lambda s: progress.advance(detail=f"{s.target}:{s.draft}, d {s.d}"),
    )
    best = max(splits, key=lambda split: split.tokens_per_s)
    source = "measured on real ranks" if use is None else f"simulated on {section['use']}"
    about = f"The fastest of {len(splits)} splits and trees, {source}, by `specdec profile`."
    write_text(folder / "strategy" / f"{BEST}.yaml", preset(best, name=BEST, about=about))
    found = {
        "source": source,
        "splits": [split.to_json() for split in splits],
        "best": best.to_json(),
        "provenance": provenance(command=sys.argv, config=cfg),
    }
    write_json(folder / RESULT_FILE, found)
    return found


def print_splits(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the table of splits, fastest first, and the best."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    heads = ("target:draft", "bs", "w", "d", "t target", "t draft", "accepted", "tokens/s")
    table = Table(*heads, box=None, padding=(0, 1))
    for split in sorted(found["splits"], key=lambda s: -s["tokens_per_s"]):
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
    best = Split(**found["best"])
    console.print(
        f"{found['source']}; accepted: emitted tokens per target pass"
        + ("; * a degree between two of the profile's" if _any_interpolated(found) else ""),
        highlight=False,
    )
    console.print(
        f"best: {best.target}:{best.draft}, bs {best.bs}, w {best.w}, d {best.d}", highlight=False
    )


def _any_interpolated(found: Mapping[str, Any]) -> bool:
    return any(split["interpolated"] for split in found["splits"])
