"""Reads acceptance as inference engines report it per request: vLLM, SGLang and llama.cpp.

Sources of the keys: vLLM #48915 (``metrics.speculative_decoding`` of responses) and its periodic
log line ``SpecDecoding metrics``; SGLang #11144, #18332 and #33518 (``meta_info`` and ``sglext``);
llama.cpp #12603 (``timings``) and #24536 (line of ``print_timing``). All histograms count accepted
draft tokens, without the target's own. All readers return None for any other object or line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.fitting.requests import (
    RequestLog,
    of_histogram,
    of_passes,
    of_rates,
    of_totals,
    whole_numbers,
)

_NUMBER = r"([\d.]+)"
_VLLM_LINE = re.compile(r"SpecDecoding metrics:(.*)")
_VLLM_FIELDS = {
    "mean": re.compile(rf"Mean acceptance length:\s*{_NUMBER}"),
    "accepted": re.compile(r"Accepted:\s*(\d+)"),
    "drafted": re.compile(r"Drafted:\s*(\d+)"),
    "rates": re.compile(r"Per-position acceptance rate:\s*([\d.,\s]+)"),
}
_LLAMA_LINE = re.compile(
    rf"draft acceptance(?: rate)?\s*=\s*{_NUMBER}\s*\(\s*(\d+) accepted\s*/\s*(\d+) generated\)"
    rf"(?:, mean acceptance length =\s*{_NUMBER})?"
    r"(?:, acceptance rate per position = \(([\d.,\s]+)\))?"
)
_SGLANG_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_SGLANG_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_SGLANG_DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")


def from_vllm(node: Mapping[str, Any], name: str, draft_tokens: int | None) -> RequestLog | None:
    if "acceptance_histogram" not in node and "per_step_accepted" not in node:
        return None
    longest = _count(node.get("num_spec_tokens")) or draft_tokens
    steps = node.get("per_step_accepted")
    if isinstance(steps, list) and steps:
        accepted = whole_numbers(steps, f"{name}: per_step_accepted")
        drafted = node.get("per_step_drafted", node.get("per_step_num_draft_tokens"))
        if isinstance(drafted, list):
            return of_passes(name, accepted, drafted=whole_numbers(drafted, f"{name}: drafted"))
        each = None if longest is None else np.full(len(accepted), longest)
        return of_passes(name, accepted, drafted=each)
    return _histogram(node.get("acceptance_histogram"), f"{name}: acceptance_histogram", longest)


def from_sglang(node: Mapping[str, Any], name: str, draft_tokens: int | None) -> RequestLog | None:
    """Reads SGLang's ``meta_info`` or statistics object.

    ``accept_lengths`` counts draft tokens if it contains a 0, and emitted tokens otherwise.
    """
    verified, emitted = node.get("verify_lengths"), node.get("accept_lengths")
    if isinstance(verified, list) and isinstance(emitted, list) and emitted:
        accepted = whole_numbers(emitted, f"{name}: accept_lengths")
        drafted = whole_numbers(verified, f"{name}: verify_lengths")
        own = int(accepted.min() > 0)
        return of_passes(name, accepted - own, drafted=drafted - own)
    passes = _count(node.get("spec_verify_ct"))
    accepted_total: float | None = _first(node, _SGLANG_ACCEPTED)
    drafted_total = _first(node, _SGLANG_DRAFTED)
    longest = draft_tokens
    if passes and drafted_total:
        longest = max(round(drafted_total / passes), 1)
    for key in _SGLANG_HISTOGRAMS:
        if isinstance(node.get(key), list) and node[key]:
            return _histogram(node[key], f"{name}: {key}", longest)
    if not passes:
        return None
    if accepted_total is None:
        length = node.get("spec_accept_length")
        tokens = node.get("completion_tokens")
        if isinstance(length, int | float):
            accepted_total = max(length - 1.0, 0.0) * passes
        elif isinstance(tokens, int):
            accepted_total = max(tokens - passes, 0)
    if accepted_total is None:
        return None
    if longest is None:
        raise UserError(f"{name} states no number of draft tokens per pass: give draft_tokens=K")
    return of_totals(name, passes, accepted_total, longest)


def from_llama_cpp(
    node: Mapping[str, Any], name: str, draft_tokens: int | None
) -> RequestLog | None:
    drafted, accepted = node.get("draft_n"), node.get("draft_n_accepted")
    if type(drafted) is not int or type(accepted) is not int:
        return None
    emitted = node.get("predicted_n")
    passes = emitted - accepted if type(emitted) is int and emitted > accepted else None
    return _totals(name, accepted, drafted, passes, draft_tokens)


def from_line(line: str, name: str, draft_tokens: int | None) -> RequestLog | None:
    found = _VLLM_LINE.search(line)
    if found is not None:
        return _vllm_line(found[1], name)
    found = _LLAMA_LINE.search(line)
    if found is None:
        return None
    _, accepted, drafted, mean, rates = found.groups()
    if int(drafted) == 0:
        return None
    passes = int(accepted) / (float(mean) - 1.0) if mean and float(mean) > 1.0 else None
    if rates:
        shares = _floats(rates)
        total = sum(shares)
        count = passes or (int(accepted) / total if total > 0 else int(drafted) / len(shares))
        return of_rates(name, count, shares)
    return _totals(name, int(accepted), int(drafted), passes, draft_tokens)


def _vllm_line(text: str, name: str) -> RequestLog | None:
    found = {key: pattern.search(text) for key, pattern in _VLLM_FIELDS.items()}
    rates, drafted = found["rates"], found["drafted"]
    if rates is None:
        return None
    shares = _floats(rates[1])
    # Lines that have rates but no totals get equal weight.
    passes = int(drafted[1]) / len(shares) if drafted is not None else 1.0
    return of_rates(name, passes, shares) if passes > 0 else None


def _totals(
    name: str, accepted: int, drafted: int, passes: float | None, draft_tokens: int | None
) -> RequestLog:
    if passes is None and draft_tokens is None:
        raise UserError(
            f"{name} has totals only ({accepted} accepted of {drafted}): give draft_tokens=K, the"
            " number of draft tokens per pass"
        )
    if draft_tokens is not None:
        passes = drafted / draft_tokens
    assert passes is not None, "checked above"
    return of_totals(name, passes, accepted, draft_tokens or max(drafted / passes, 1.0))


def _histogram(values: Any, where: str, draft_tokens: int | None) -> RequestLog:
    if isinstance(values, dict) and all(str(key).isdigit() for key in values):
        longest = max((int(key) for key in values), default=0)
        values = [values.get(str(at), values.get(at, 0)) for at in range(min(longest, 4096) + 1)]
    good = isinstance(values, list) and all(type(v) in (int, float) and v >= 0 for v in values)
    if not good or not values or not sum(values):
        raise UserError(f"{where} must be a list of counts, not all of them 0")
    return of_histogram(where.partition(":")[0], np.array(values, float), draft_tokens)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _first(node: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((node[key] for key in keys if type(node.get(key)) is int), None)


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.replace(",", " ").split()]
