"""Compares long outputs in the configured dtype with plain decoding, if ``model.exact=true``.

Plain decoding here is the preset ``ar`` on the same pair: on one device, or on the same
tensor-parallel group, whose sums define the bits. The configured strategy must produce its tokens
exactly; there is no tolerance for ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specdec.certify.cases import GREEDY, Case, Decoded
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import Subject, decode_cases
from specdec.metrics.parity import first_difference
from specdec.pairs import HuggingFacePair
from specdec.runs.jobs import prepare
from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.types import Lossless

NUM_PROMPTS = 2
NUM_TOKENS = 160  # per prompt and sampling
_MAX_PROMPT_TOKENS = 96
_SAMPLED = SamplingParams(temperature=1.0)  # draws near the edge of the CDF show small differences
_PREFILL_CHUNK = 512


def exact_dtype(subject: Subject) -> Check:
    """Checks that outputs in the configured dtype equal plain decoding token for token."""
    model = subject.cfg["model"]
    if not model.get("exact"):
        return Check("exact_dtype", None, "model.exact=false: rounding may decide between tokens")
    if subject.claims is Lossless.LOSSY:
        return Check("exact_dtype", None, "a lossy output has no reference")
    data = {**subject.cfg["data"], "limit": NUM_PROMPTS}
    pair, prompts, _ = prepare({**subject.cfg, "data": data, "max_new_tokens": 1})
    assert isinstance(pair, HuggingFacePair)
    room = (pair.max_positions or NUM_TOKENS + _MAX_PROMPT_TOKENS) - 1
    longest = min(_MAX_PROMPT_TOKENS, max(1, room - NUM_TOKENS))
    stop = StopRules(max_new_tokens=min(NUM_TOKENS, room - longest))
    samplings = [GREEDY]
    if subject.claims is Lossless.TOKEN:
        samplings += [_SAMPLED if subject.sampling.greedy else subject.sampling]
    cases = [
        Case(
            2 * prompt.id + number,
            f"prompt {prompt.id}, {'greedy' if params.greedy else 'sampled'}",
            tuple(prompt.tokens.tolist()[-longest:]),
            params,
            stop,
        )
        for prompt in prompts[:NUM_PROMPTS]
        for number, params in enumerate(samplings)
    ]
    cfg = subject.cfg
    expected = _decode(subject, plain_config(cfg), pair, cases, 1, _PREFILL_CHUNK)
    outputs = _decode(
        subject, cfg, pair, cases, subject.batch_size, int(subject.cfg["prefill_chunk"])
    )
    problems = [
        problem
        for case in cases
        if (problem := _problem(case, outputs[case.id], expected[case.id]))
    ]
    num_tokens = sum(len(outputs[case.id].output) for case in cases)
    detail = f"{pair.dtype}, {torch.get_num_threads()} threads, {num_tokens} tokens"
    if problems:
        return Check("exact_dtype", False, f"{detail}: {joined_details(problems)}")
    return Check("exact_dtype", True, f"{detail}: no difference from plain decoding")


def plain_config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the parts of ``cfg`` by those of plain decoding, whose output is the reference.

    Tensor-parallel executors are kept, because the order of their sums is part of the reference.
    """
    executor = cfg["executor"]
    if not executor.get("target_degree"):
        executor = {"_target_": "specdec.executors.LocalExecutor"}
    return {
        **cfg,
        "source": {"_target_": "specdec.sources.NullSource"},
        "policy": {"_target_": "specdec.policies.RootOnly"},
        "verifier": {"_target_": "specdec.verifiers.MatchVerifier"},
        "executor": executor,
        "trace": False,
    }


def _decode(
    subject: Subject,
    cfg: Mapping[str, Any],
    pair: HuggingFacePair,
    cases: list[Case],
    batch_size: int,
    prefill_chunk: int,
) -> dict[int, Decoded]:
    parts = subject.build(cfg, pair)
    try:
        return decode_cases(parts, cases, batch_size=batch_size, prefill_chunk=prefill_chunk)
    finally:
        parts.executor.shutdown()


def _problem(case: Case, decoded: Decoded, expected: Decoded) -> str:
    """Describes the first difference; empty if there is none."""
    at = first_difference(decoded.output, expected.output)
    if at is None:
        return ""
    if at >= min(len(decoded.output), len(expected.output)):
        return f"{case.label}, token {at}: one output ends"
    tokens = f"{decoded.output[at]} from {decoded.proposer(at)} instead of {expected.output[at]}"
    return f"{case.label}, token {at}: {tokens}"
