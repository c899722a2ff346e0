from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.files import write_json, write_text
from specdec.planning.answer import Plan, Recommendation
from specdec.planning.chains import ChainCell
from specdec.planning.simulate import Candidate

PRESET = "planned"

RESULT_FILE = "plan.json"
"""This file is written last, so a folder that has it has a whole plan."""

TABLE_FILE = "plan.txt"

_LOOKUP_MAX = 16  # most tokens of a match, as in source=prompt_lookup
_VLLM = {"specdec.sources.PromptLookupSource": "ngram"}  # sources without a draft
_SGLANG = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}
_SHOWN = 8  # rows of the ranking
_WIDTH = 110


def write_plan(folder: Path, plan: Plan, winner: Candidate, provenance: Mapping[str, Any]) -> None:
    write_parts(folder, winner, plan.best.tokens_per_s)
    write_text(folder / TABLE_FILE, table(plan))
    write_json(folder / RESULT_FILE, {**plan.to_json(), "provenance": provenance})


def write_parts(folder: Path, candidate: Candidate, tokens_per_s: float) -> None:
    """Writes preset and profile for ``--config-dir DIR strategy=planned``."""
    write_text(folder / "strategy" / f"{PRESET}.yaml", preset(candidate, tokens_per_s))
    write_text(folder / "profile" / f"{PRESET}.yaml", profile(candidate))


def preset(winner: Candidate, tokens_per_s: float) -> str:
    """Returns a strategy's YAML; ``tokens_per_s`` is the expected speed, for its comment."""
    choices, layout = winner.config["choices"], winner.layout
    executor = str(choices["executor"])
    has_keys = len(winner.config["executor"]) > 1
    if has_keys and executor == "local":
        executor = "pipeline"
    lines = [
        "# @package _global_",
        f"# By `specdec plan`: {winner.name} on {layout.told()},"
        f" {tokens_per_s:.1f} tokens/s expected.",
        "defaults:",
        *(f"  - override /{part}: {choices[part]}" for part in ("source", "policy", "verifier")),
        f"  - override /executor: {executor}",
        *([f"  - override /serving: {choices['serving']}"] if "serving" in choices else []),
        "strategy:",
        f"  name: {PRESET}",
        f"  title: {winner.told()} on {layout.told()}, by specdec plan",
        "  kind: parts",
        "  baseline: false",
    ]
    if winner.sizes:
        lines += ["policy:", *(f"  {k}: {json.dumps(v)}" for k, v in winner.sizes.items())]
    if has_keys:
        known = ("stages", "target_degree", "draft_degree", "shared", "replicas")
        node = winner.config["executor"]
        keys = {key: node[key] for key in known if key in node}
        lines += ["executor:", *(f"  {k}: {json.dumps(v)}" for k, v in keys.items())]
    return "\n".join(lines) + "\n"


def profile(winner: Candidate) -> str:
    clock = winner.config["clock"]
    lines = [
        f"# Times of the first choice of a plan, on {winner.layout.told()}.",
        f"note: {json.dumps(clock['note'])}",
        f"stages: {winner.layout.stages}",
        "costs:",
    ]
    for kind, curve in clock["costs"].items():
        inner = ", ".join(f"{key}: {json.dumps(value)}" for key, value in curve.items())
        lines.append(f"  {kind}: {{{inner}}}")
    return "\n".join(lines) + "\n"


def engine_flags(
    cell: ChainCell | None, draft: str, drafter: str, winner: Candidate
) -> dict[str, str]:
    """Returns flags of vLLM and SGLang for the best chain, or for a first choice that copies text.

    Names as in vLLM's docs/features/speculative_decoding/configuration.md (9d0e0b83) and SGLang's
    docs/advanced_features/speculative_decoding.md (067ad4d3). SGLang's n-gram method is left out,
    since it verifies trees of another shape.
    """
    copies = _VLLM.get(str(winner.config["source"].get("_target_")))
    if copies is not None and "gamma" in winner.config["policy"]:
        return {"vLLM": _vllm(copies, int(winner.config["policy"]["gamma"]), draft)}
    if cell is None:
        return {}
    number, algorithm = cell.draft_tokens, _SGLANG.get(drafter)
    if number == 0:
        off = "no speculation: plain decoding is faster at this batch and context"
        return {"vLLM": off, "SGLang": off}
    flags = {"vLLM": _vllm(drafter, number, draft)}
    if algorithm is not None:
        flags["SGLang"] = (
            f"--speculative-algorithm {algorithm} --speculative-draft-model-path {draft}"
            f" --speculative-num-steps {number} --speculative-eagle-topk 1"
            f" --speculative-num-draft-tokens {number + 1}"
        )
    return flags


def _vllm(method: str, number: int, draft: str) -> str:
    lookup = method == "ngram"
    config: dict[str, Any] = {"method": method, **({} if lookup else {"model": draft})}
    config |= {"num_speculative_tokens": number}
    config |= {"prompt_lookup_max": _LOOKUP_MAX} if lookup else {}
    return f"--speculative-config '{json.dumps(config)}'"


def table(plan: Plan) -> str:
    lines = [
        f"plan for {plan.objective}: batch {plan.batch}, context {plan.context},"
        f" {plan.devices} device{'s' * (plan.devices > 1)}; simulated time on {plan.machine}",
        f"acceptance: {plan.acceptance}",
        *_ranking(plan),
        *_chains(plan),
    ]
    told = [f"decides: {text}" for text in plan.decides]
    told += [f"changes it: {text}" for text in plan.changes_told]
    told += [
        f"at batch {row['batch']}: {row['told']}, {row['tokens_per_s']:.1f} tokens/s"
        f" ({row['gain']:.2f}x)"
        for row in plan.by_batch
    ]
    told += [f"{engine}: {flags}" for engine, flags in plan.engines.items()]
    told += [f"note: {text}" for text in plan.notes]
    for text in told:
        lines += textwrap.wrap(
            text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def _ranking(plan: Plan) -> list[str]:
    """Returns the best of each preset; its share of being first is that of all its sizes."""
    best = list({c.strategy: c for c in reversed(plan.choices)}.values())
    first = {
        b.strategy: sum(c.first for c in plan.choices if c.strategy == b.strategy) for b in best
    }
    shown = sorted(best, key=plan.choices.index)
    if len(shown) > _SHOWN:  # keep plain decoding in the table
        plain = next(c for c in shown if c.is_plain)
        shown = [*shown[: _SHOWN - 1], *([] if plain in shown[: _SHOWN - 1] else [plain])]
    limit = plan.memory_limit_gb
    names = [_named(choice) for choice in shown]
    width = max(len(name) for name in names)
    places = max(len(choice.layout) for choice in shown)
    head = (
        f" {'strategy':<{width}}  {'layout':<{places}}  {'tokens/s (95 %)':>22}"
        f"  {'gain (95 %)':>18}  {'first':>5}  GB/device"
    )
    rows = [head]
    for name, choice in zip(names, shown, strict=True):
        low, high = choice.tokens_per_s_interval
        gain_low, gain_high = choice.gain_interval
        speed = f"{choice.tokens_per_s:.1f} ({low:.1f}-{high:.1f})"
        gain = f"{choice.gain:.2f} ({gain_low:.2f}-{gain_high:.2f})"
        memory = "?" if choice.memory_gb is None else f"{_gb(choice.memory_gb)} of {limit:g}"
        rows.append(
            f" {name:<{width}}  {choice.layout:<{places}}  {speed:>22}  {gain:>18}"
            f"  {100 * first[choice.strategy]:>3.0f} %  {memory}"
        )
    return rows


def _gb(size: float) -> str:
    return f"{size:.1f}" if size >= 1.0 else f"{size:.2g}"


def _named(choice: Recommendation) -> str:
    sizes = " ".join(
        f"{key}={json.dumps(value).replace(' ', '')}" for key, value in choice.sizes.items()
    )
    return f"{choice.strategy} {sizes}".strip()


def _chains(plan: Plan) -> list[str]:
    if not plan.chains:
        return []
    contexts = list(dict.fromkeys(cell.context for cell in plan.chains))
    batches = sorted({cell.batch for cell in plan.chains})
    cells = {(cell.batch, cell.context): cell for cell in plan.chains}
    lines = [
        "draft tokens of the best chain drafted before each pass (gain over plain decoding), by"
        " formula:",
        f" {'context':>8}"
        + "".join(f"{f'batch {b}':>15}" for b in batches)
        + ("   plain best from" if plan.crossover else ""),
    ]
    for context in contexts:
        row = "".join(f"{_cell(cells.get((b, context))):>15}" for b in batches)
        lines.append(f" {context:>8}{row}")
        if plan.crossover:
            start = plan.crossover.get(context)
            lines[-1] += "   -" if start is None else f"   batch {start}"
    return lines


def _cell(cell: ChainCell | None) -> str:
    return "does not fit" if cell is None else f"{cell.draft_tokens} ({cell.gain:.2f}x)"
