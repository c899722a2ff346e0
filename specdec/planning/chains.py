"""Finds how many draft tokens of a chain pay, for each batch size and context, by a formula.

All requests of a batch share each pass, and drafting precedes it (Leviathan et al. 2023, section
3.3, with measured tokens per pass and times that depend on the rows). ``engine_flags`` says the
result in the words of engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from specdec.clocks.profile import CostCurve
from specdec.planning.machines import DoesNotFit, Layout, Machine, layouts
from specdec.types import FloatArray

_MOST_REQUESTS = 4096
_LOOKUP_MAX = 16  # most tokens of a match, as in source=prompt_lookup
_LOOKUP = "specdec.sources.PromptLookupSource"
_SGLANG = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


def chain_cell(
    machine: Machine, tokens_per_pass: FloatArray, batch: int, context: int
) -> dict[str, Any] | None:
    """Returns the fastest chain over all layouts; None if no layout fits.

    ``tokens_per_pass`` is float64[K + 1], for chains of 0, 1, ..., K draft tokens. ``draft_tokens``
    of the result is 0 if plain decoding is best. The speeds are those of all requests together,
    each in the layout that is best for it, and ``gain`` is their ratio.
    """
    speeds: dict[tuple[int, str], float] = {}
    for layout in layouts(machine.devices, own_draft=False, staged=True, copies=False):
        with suppress(DoesNotFit):
            costs = machine.costs(layout, batch, context)
            for draft_tokens, tokens in enumerate(tokens_per_pass.tolist()):
                seconds = 1e-3 * round_ms(costs, layout, batch, draft_tokens)
                speeds[draft_tokens, str(layout)] = batch * tokens / seconds
    if not speeds:
        return None
    draft_tokens, layout_text = max(speeds, key=lambda chain: speeds[chain])
    best = speeds[draft_tokens, layout_text]
    plain = max(speed for (number, _), speed in speeds.items() if not number)
    return {
        **{"batch": batch, "context": context, "draft_tokens": draft_tokens},
        **{"tokens_per_s": best, "plain_tokens_per_s": plain, "layout": layout_text},
        "gain": best / plain,
    }


def round_ms(costs: Mapping[str, Any], layout: Layout, batch: int, draft_tokens: int) -> float:
    """Returns the milliseconds of all draft passes and one target pass over all stages."""

    def ms(kind: str, rows: int) -> float:
        return CostCurve.of(costs[kind])(rows) if kind in costs else 0.0

    rows = batch * (draft_tokens + 1)
    stage = ms("stage", rows) + (ms("transfer", rows) if layout.stages > 1 else 0.0)
    after = ms("head", rows) + (ms("prune", rows) if draft_tokens else 0.0)
    return layout.stages * stage + after + draft_tokens * ms("draft", batch)


def crossover(machine: Machine, tokens_per_pass: FloatArray, context: int) -> int | None:
    """Returns the least number of requests from which on plain decoding stays best.

    Only powers of two are tried. None if chains pay up to ``_MOST_REQUESTS``, or up to what fits.
    """
    start, batch = None, 1
    while batch <= _MOST_REQUESTS:
        cell = chain_cell(machine, tokens_per_pass, batch, context)
        if cell is None:
            break
        start = None if cell["draft_tokens"] else start or batch
        batch *= 2
    return start


def engine_flags(
    number: int | None, draft: str, drafter: str, config: Mapping[str, Any]
) -> dict[str, str]:
    """Returns flags of vLLM and SGLang for chains of ``number`` draft tokens of a ``drafter``.

    Names as in vLLM's docs/features/speculative_decoding/configuration.md (9d0e0b83) and SGLang's
    docs/advanced_features/speculative_decoding.md (067ad4d3). SGLang's n-gram method is left out,
    since it verifies trees of another shape. ``config`` is that of the first choice, which decides
    if it copies text.
    """
    if config["source"].get("_target_") == _LOOKUP and "gamma" in config["policy"]:
        number, drafter = int(config["policy"]["gamma"]), "ngram"
    if number is None:
        return {}
    if number == 0:
        off = "no speculation: plain decoding is faster at this batch and context"
        return {"vLLM": off, "SGLang": off}
    vllm: dict[str, Any] = {"method": drafter}
    vllm |= {} if drafter == "ngram" else {"model": draft}
    vllm |= {"num_speculative_tokens": number}
    vllm |= {"prompt_lookup_max": _LOOKUP_MAX} if drafter == "ngram" else {}
    flags = {"vLLM": f"--speculative-config '{json.dumps(vllm)}'"}
    if drafter in _SGLANG:
        flags["SGLang"] = (
            f"--speculative-algorithm {_SGLANG[drafter]} --speculative-draft-model-path {draft}"
            f" --speculative-num-steps {number} --speculative-eagle-topk 1"
            f" --speculative-num-draft-tokens {number + 1}"
        )
    return flags
