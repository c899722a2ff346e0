"""The files of a plan: its table, and a preset and profile of the first choice."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.files import write_json, write_text
from specdec.planning.answer import Plan
from specdec.planning.candidates import Candidate, label
from specdec.profiling.trees import as_yaml

PRESET = "planned"
RESULT_FILE = "plan.json"
"""This file is written last, so a folder that has it has a whole plan."""

TABLE_FILE = "plan.txt"
_SHOWN = 8  # rows of the ranking
_WIDTH = 110
_EXECUTOR_KEYS = ("stages", "target_degree", "draft_degree", "shared", "replicas")


def write_plan(folder: Path, plan: Plan, winner: Candidate, provenance: Mapping[str, Any]) -> None:
    write_parts(folder, winner, plan.best.tokens_per_s)
    write_text(folder / TABLE_FILE, table(plan))
    write_json(folder / RESULT_FILE, {**asdict(plan), "provenance": provenance})


def write_parts(folder: Path, winner: Candidate, tokens_per_s: float) -> None:
    """Writes preset and profile for ``--config-dir DIR strategy=planned``."""
    choices, layout, node = winner.config["choices"], winner.layout, winner.config["executor"]
    groups = {part: choices[part] for part in ("source", "policy", "verifier", "executor")}
    if len(node) > 1 and choices["executor"] == "local":
        groups["executor"] = "pipeline"
    groups |= {"serving": choices["serving"]} if "serving" in choices else {}
    title = f"{winner} on {layout}, by specdec plan"
    preset: dict[str, Any] = {
        "defaults": [{f"override /{group}": choice} for group, choice in groups.items()],
        "strategy": {"name": PRESET, "title": title, "kind": "parts", "baseline": False},
    }
    if winner.sizes:
        preset["policy"] = dict(winner.sizes)
    if len(node) > 1:
        preset["executor"] = {key: node[key] for key in _EXECUTOR_KEYS if key in node}
    text = f"{winner.name} on {layout}, {tokens_per_s:.1f} tokens/s expected."
    head = f"# @package _global_\n# By `specdec plan`: {text}\n"
    write_text(folder / "strategy" / f"{PRESET}.yaml", head + as_yaml(preset))
    clock = winner.config["clock"]
    profile = {"note": clock["note"], "stages": layout.stages, "costs": clock["costs"]}
    head = f"# Times of the first choice of a plan, on {layout}.\n"
    write_text(folder / "profile" / f"{PRESET}.yaml", head + as_yaml(profile))


def table(plan: Plan) -> str:
    lines = [
        f"plan for {plan.objective}: batch {plan.batch}, context {plan.context},"
        f" {plan.devices} device{'s' * (plan.devices > 1)}; simulated time on {plan.machine}",
        f"acceptance: {plan.acceptance}",
        *_ranking(plan),
        *_chains(plan),
    ]
    texts = [f"decides: {text}" for text in plan.decides]
    texts += [f"changes it: {text}" for text in plan.changes_text]
    row = "at batch {batch}: {label}, {tokens_per_s:.1f} tokens/s ({gain:.2f}x)"
    texts += [row.format(**of_batch) for of_batch in plan.by_batch]
    texts += [f"{engine}: {flags}" for engine, flags in plan.engines.items()]
    texts += [f"note: {text}" for text in plan.notes]
    wrapper = textwrap.TextWrapper(
        _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    lines += [line for text in texts for line in wrapper.wrap(text)]
    return "\n".join(lines) + "\n"


def _ranking(plan: Plan) -> list[str]:
    """Returns the best of each preset; its share of being first is that of all its sizes."""
    shares: dict[str, float] = {}
    shown = []
    for choice in plan.choices:
        if choice.strategy not in shares:
            shown.append(choice)
        shares[choice.strategy] = shares.get(choice.strategy, 0.0) + choice.first
    plain = [choice for choice in shown[_SHOWN - 1 :] if choice.is_plain]
    shown = [*shown[: _SHOWN - len(plain)], *plain]  # plain decoding in any case
    rows = [("strategy", "layout", "tokens/s (95 %)", "gain (95 %)", "first", "GB/device")]
    for c in shown:
        speed, gain = c.tokens_per_s_interval, c.gain_interval
        size = "?"
        if c.memory_gb is not None:
            size = f"{c.memory_gb:{'.1f' if c.memory_gb >= 1 else '.2g'}}"
            size += f" of {plan.memory_limit_gb:g}"
        row = (
            *(label(c.strategy, c.sizes), c.layout),
            f"{c.tokens_per_s:.1f} ({speed[0]:.1f}-{speed[1]:.1f})",
            f"{c.gain:.2f} ({gain[0]:.2f}-{gain[1]:.2f})",
            *(f"{100 * shares[c.strategy]:.0f} %", size),
        )
        rows.append(row)
    return _aligned(rows, left=2)


def _chains(plan: Plan) -> list[str]:
    if not plan.chains:
        return []
    batches = sorted({cell["batch"] for cell in plan.chains})
    rows = [["context", *(f"batch {b}" for b in batches), "plain best from"]]
    for context in dict.fromkeys(cell["context"] for cell in plan.chains):
        cells = {
            cell["batch"]: f"{cell['draft_tokens']} ({cell['gain']:.2f}x)"
            for cell in plan.chains
            if cell["context"] == context
        }
        start = plan.crossover.get(context)
        limit = "-" if start is None else f"batch {start}"
        rows.append([str(context), *(cells.get(b, "does not fit") for b in batches), limit])
    title = "draft tokens of the best chain drafted before each pass (gain over plain decoding), by"
    return [f"{title} formula:", *_aligned([r if plan.crossover else r[:-1] for r in rows], left=0)]


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Pads columns to equal widths; the first ``left`` ones are left-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'<' if at < left else '>'}{width}}}" for at, width in enumerate(widths)]
    return [" " + "  ".join(forms).format(*row) for row in rows]
