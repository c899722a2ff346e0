"""The files of a plan: its table, and a preset and profile of the first choice."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.files import write_json, write_text
from specdec.planning.answer import Plan
from specdec.planning.candidates import Candidate
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
    has_keys = len(node) > 1
    groups = {f"override /{part}": choices[part] for part in ("source", "policy", "verifier")}
    local = has_keys and choices["executor"] == "local"
    groups["override /executor"] = "pipeline" if local else choices["executor"]
    if "serving" in choices:
        groups["override /serving"] = choices["serving"]
    preset: dict[str, Any] = {
        "defaults": [{key: value} for key, value in groups.items()],
        "strategy": {
            "name": PRESET,
            "title": f"{winner} on {layout}, by specdec plan",
            "kind": "parts",
            "baseline": False,
        },
    }
    if winner.sizes:
        preset["policy"] = dict(winner.sizes)
    if has_keys:
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
    for text in texts:
        lines += textwrap.wrap(
            text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
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
    cells = [("strategy", "layout", "tokens/s (95 %)", "gain (95 %)", "first", "GB/device")]
    for c in shown:
        sizes = (f"{k}={json.dumps(v, separators=(',', ':'))}" for k, v in c.sizes.items())
        low, high = c.tokens_per_s_interval
        gain_low, gain_high = c.gain_interval
        size = (
            "?" if c.memory_gb is None else f"{c.memory_gb:{'.1f' if c.memory_gb >= 1 else '.2g'}}"
        )
        row = (
            " ".join([c.strategy, *sizes]),
            c.layout,
            f"{c.tokens_per_s:.1f} ({low:.1f}-{high:.1f})",
            f"{c.gain:.2f} ({gain_low:.2f}-{gain_high:.2f})",
            f"{100 * shares[c.strategy]:.0f} %",
            size if c.memory_gb is None else f"{size} of {plan.memory_limit_gb:g}",
        )
        cells.append(row)
    first, second = (max(len(row[at]) for row in cells) for at in (0, 1))
    return [
        f" {name:<{first}}  {layout:<{second}}  {speed:>22}  {gain:>18}  {share:>5}  {memory}"
        for name, layout, speed, gain, share, memory in cells
    ]


def _chains(plan: Plan) -> list[str]:
    if not plan.chains:
        return []
    batches = sorted({cell.batch for cell in plan.chains})
    lines = [
        "draft tokens of the best chain drafted before each pass (gain over plain decoding), by"
        " formula:",
        f" {'context':>8}"
        + "".join(f"{f'batch {b}':>15}" for b in batches)
        + ("   plain best from" if plan.crossover else ""),
    ]
    for context in dict.fromkeys(cell.context for cell in plan.chains):
        cells = {
            c.batch: f"{c.draft_tokens} ({c.gain:.2f}x)"
            for c in plan.chains
            if c.context == context
        }
        row = "".join(f"{cells.get(batch, 'does not fit'):>15}" for batch in batches)
        lines.append(f" {context:>8}{row}")
        if plan.crossover:
            start = plan.crossover.get(context)
            lines[-1] += "   -" if start is None else f"   batch {start}"
    return lines
