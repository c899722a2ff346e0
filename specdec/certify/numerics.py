"""Checks the configured models in the configured precision, with a tolerance for ties.

Batched and single-token passes round differently, so outputs may differ where two tokens are
equally good up to rounding. Each token is compared with that of plain decoding after the same
tokens. Where it differs, the distance by which plain decoding missed it is compared with the
measured effect of batching on the logits: up to it the difference is a *tie*, beyond it a fault.

Plain decoding is that of the torch model. A quantised target in ONNX Runtime rounds activations
too, which no torch model does: its reference is its own session with one row per pass, and the
effect of batching is measured at the position of the difference.

Shape letters: V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec.certify.cases import GREEDY, Case
from specdec.certify.oracle import (
    plain_decode,
    processed,
    reference_probs,
    reference_reason,
    reference_token,
    target_draw,
)
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import Decoded, Subject, decode_cases
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.metrics.compare import first_difference
from specdec.models.slicing import cache_argument
from specdec.pairs import HuggingFacePair
from specdec.runs.jobs import prepare, stop_rules
from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.types import BoolArray, FloatArray, Lossless

NUM_PROMPTS = 3
ROW_COUNTS = (2, 4, 8)  # of passes that are compared with passes of one row
MAX_NEW_TOKENS = 24
_MAX_PROMPT_TOKENS = 64

NUM_EXACT_PROMPTS = 2
NUM_EXACT_TOKENS = 160  # per prompt and sampling
_MAX_EXACT_PROMPT = 96
_EXACT_SAMPLING = SamplingParams(temperature=1.0)  # draws near a CDF edge show small differences


@dataclass(frozen=True, slots=True)
class Distance:
    """How far plain decoding was from choosing another token.

    The distance is a "top-two gap" in logits or a "CDF edge" in probability; for a token that a
    filter removed it is a "filter boundary and CDF edge". ``allowance`` is the largest distance
    that rounding explains, in the same unit.
    """

    kind: str
    value: float
    allowance: float

    @property
    def is_tie(self) -> bool:
        return self.value <= self.allowance


class SingleToken:
    """Computes logits of plain decoding: one token per pass, with transformers' own cache.

    ``rows`` has the float64[V] logits after each position so far.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: list[FloatArray] = []
        self._model = model
        self._cache: Any = None

    def __call__(self, tokens: tuple[int, ...]) -> FloatArray:
        """Returns float64[V], the logits after ``tokens``, which must extend the last call's."""
        device, name = next(self._model.parameters()).device, cache_argument(self._model)
        with torch.inference_mode():
            for token in tokens[len(self.rows) :]:
                out = self._model(
                    torch.tensor([[token]], device=device),
                    use_cache=True,
                    **{name: self._cache},
                )
                self._cache = getattr(out, name)
                self.rows.append(out.logits[0, -1].to(torch.float64).cpu().numpy())
        return self.rows[-1]


def batching_error(
    model: PreTrainedModel, tokens: tuple[int, ...], rows: list[FloatArray]
) -> float:
    """Returns the largest difference of the logits of one pass over all tokens from ``rows``."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)], device=device), use_cache=False)
    batched = out.logits[0].to(torch.float64).cpu().numpy()
    return float(np.abs(batched - np.stack(rows[: len(tokens)])).max())


def distance(
    logits: FloatArray, params: SamplingParams, draw: float, token: int, error: float
) -> Distance:
    """Measures how far plain decoding was from choosing ``token``, as the strategy did.

    Args:
        logits: float64[V] after the processors.
        draw: the uniform draw of plain decoding.
        error: the largest change of a logit by batching.
    """
    if params.greedy:
        return Distance("top-two gap", float(logits.max() - logits[token]), 2.0 * error)
    probs = reference_probs(logits, params)
    cdf = probs.cumsum()
    low, high = float(cdf[token] - probs[token]), float(cdf[token])
    lowest, highest = _possible_share(logits, params, token, error)
    kind = "CDF edge" if probs[token] > 0.0 else "filter boundary and CDF edge"
    if draw < low:
        return Distance(kind, low - draw, low - lowest)
    return Distance(kind, max(draw - high, 0.0), highest - high)


def _possible_share(
    logits: FloatArray, params: SamplingParams, token: int, error: float
) -> tuple[float, float]:
    """Bounds ``token``'s part of the CDF (lowest start, highest end) for logits within ``error``.

    Returns (inf, -inf) if no such logits let ``token`` pass the filters.
    """
    certain, possible = _filtered(logits, params, error)
    if not possible[token]:
        return np.inf, -np.inf
    least, most = _weights(logits, params, error, certain, possible)
    lowest = float(_share(least[:token].sum(), most[token:].sum()))
    highest = float(_share(most[: token + 1].sum(), least[token + 1 :].sum()))
    return lowest, highest


def _weights(
    logits: FloatArray,
    params: SamplingParams,
    error: float,
    certain: BoolArray,
    possible: BoolArray,
) -> tuple[FloatArray, FloatArray]:
    """Bounds the unnormalised probabilities, float64[V] each; 0 for a removed token."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    swing = np.exp(min(error / params.temperature, 50.0))
    return np.where(certain, weights / swing, 0.0), np.where(possible, weights * swing, 0.0)


def _share(part: Any, rest: Any) -> Any:
    return part / np.maximum(part + rest, 1e-300)


def _filtered(
    logits: FloatArray, params: SamplingParams, error: float
) -> tuple[BoolArray, BoolArray]:
    """Returns bool[V], tokens certainly kept and possibly kept, for logits within ``error``."""
    certain, possible = np.ones((2, len(logits)), np.bool_)
    if 0 < params.top_k < len(logits):
        kth = np.sort(logits)[-params.top_k]
        certain, possible = logits > kth + 2.0 * error, logits >= kth - 2.0 * error
    if params.top_p == 1.0:
        return certain, possible
    least, most = _weights(logits, params, error, certain, possible)
    order = np.argsort(-logits, kind="stable")
    descending = -logits[order]
    least_to, most_to = (np.append(0.0, w[order].cumsum()) for w in (least, most))
    # Number of tokens that certainly and that possibly rank above each token.
    sure = np.searchsorted(descending, -logits - 2.0 * error, side="left")
    maybe = np.searchsorted(descending, -logits + 2.0 * error, side="right")
    lowest = _share(least_to[sure], most_to[-1] - most_to[sure])
    highest = _share(most_to[maybe] - most, least_to[-1] - least_to[maybe] + least)
    return certain & (highest < params.top_p), possible & (lowest < params.top_p)


class CannotCompose(UserError):
    """The strategy cannot decode the configured models, which is no fault of either."""


def numerics(subject: Subject) -> Check:
    """Checks that outputs of the configured models differ from plain decoding only at ties."""
    kind = subject.cfg["model"]["kind"]
    if kind not in ("pretrained", "random"):
        return Check("numerics", None, f"model={kind} has no logits")
    cfg = _limited(subject.cfg)
    try:
        pair, prompts, _ = prepare(cfg)
        parts = subject.build(cfg, pair)
    except UserError as refusal:
        raise CannotCompose(str(refusal)) from refusal
    assert isinstance(pair, HuggingFacePair)
    bits = pair.options.bits_of("target")
    params = subject.sampling if subject.claims is Lossless.TOKEN else GREEDY
    stop = stop_rules(cfg, pair)
    cases = [
        Case(p.id, f"prompt {p.id}", tuple(p.tokens.tolist()[-_MAX_PROMPT_TOKENS:]), params, stop)
        for p in prompts
    ]
    try:
        outputs = decode_cases(
            parts,
            cases,
            batch_size=subject.batch_size,
            prefill_chunk=int(cfg["prefill_chunk"]),
        )
    finally:
        parts.executor.shutdown()
    measure = _torch_passes(pair) if bits is None else _session_passes(pair)
    comparisons = [_compare(subject, measure, case, outputs[case.id]) for case in cases]
    if subject.claims is Lossless.LOSSY:
        texts = [c.texts[0] for c in comparisons if c.texts]
        if not texts:
            detail = f"{len(comparisons)} prompts happen to equal plain decoding"
            return Check("numerics", None, detail)
        number = f"{len(texts)} of {len(comparisons)} prompts differ"
        return Check("numerics", False, f"lossy: {number}; {joined_details(texts)}")
    measured = _measured(bits, [c.passes for c in comparisons])
    label = f"{pair.dtype if bits is None else f'int{bits}'}, {len(cases)} prompts"
    faults = [c.texts[-1] for c in comparisons if c.faulty]
    if faults:
        return Check("numerics", False, f"{label}: {joined_details(faults)}; {measured}")
    ties = [text for c in comparisons for text in c.texts]
    equal = f"{sum(not c.texts for c in comparisons)} equal plain decoding"
    rest = "no ties"
    if ties:
        tokens = sum(len(outputs[case.id].output) for case in cases)
        rate = f"{len(ties)} ties in {tokens} tokens ({1000 * len(ties) / tokens:.1f} per 1,000)"
        rest = f"{rate}: {joined_details(ties)}"
    return Check("numerics", True, f"{label}: {equal}, {rest}; {measured}")


@dataclass(frozen=True, slots=True)
class Passes:
    """Logits of one sequence by passes of one row, and what passes of more rows change.

    Attributes:
        rows: float64[T, V], the logits after each token.
        errors: float64[T], the largest change of a logit by passes of more rows.
        changed: number of rows in a pass -> float64[T], largest change of a logit; 0: equal bits.
    """

    rows: FloatArray
    errors: FloatArray
    changed: Mapping[int, FloatArray] = field(default_factory=dict)


def _torch_passes(pair: HuggingFacePair) -> Callable[[tuple[int, ...]], Passes]:
    def passes(tokens: tuple[int, ...]) -> Passes:
        single = SingleToken(pair.target)
        single(tokens)
        error = batching_error(pair.target, tokens, single.rows)
        return Passes(np.stack(single.rows), np.full(len(tokens), error))

    return passes


def _session_passes(pair: HuggingFacePair) -> Callable[[tuple[int, ...]], Passes]:
    """The session itself is the reference: no torch model rounds activations as it does."""
    runner = pair.runner("target", Meter())

    def logits(tokens: tuple[int, ...], size: int) -> FloatArray:
        cache, found = runner.new_cache(len(tokens)), []
        for start in range(0, len(tokens), size):
            part = np.array(tokens[start : start + size])
            output = runner.forward([cache.rows(prefix_tokens=part)])
            assert output.logits is not None
            found.append(output.logits.to(torch.float64).numpy())
        return np.concatenate(found)

    def passes(tokens: tuple[int, ...]) -> Passes:
        rows = logits(tokens, 1)
        sizes = (*ROW_COUNTS, len(tokens))
        changed = {size: np.abs(logits(tokens, size) - rows).max(1) for size in sizes}
        return Passes(rows, np.max([*changed.values()], 0), changed)

    return passes


def _measured(bits: int | None, passes: Sequence[Passes]) -> str:
    if bits is None:
        error = max(p.errors.max() for p in passes)
        return f"batched and single-token logits differ by up to {error:.1e}"
    parts = []
    for size in ROW_COUNTS:
        changed = np.concatenate([p.changed[size] for p in passes])
        parts.append(f"{size} rows: {np.mean(changed > 0.0):.0%}, by up to {changed.max():.1e}")
    largest = max(np.abs(p.rows).max() for p in passes)
    return (
        f"logits that differ in bits from a pass of one row, in passes of {'; '.join(parts)}"
        f" (largest logit {largest:.3g})"
    )


@dataclass(frozen=True, slots=True)
class _OutputComparison:
    texts: Sequence[str]  # the differences, up to the first that is no tie
    faulty: bool  # whether the last one is no tie
    passes: Passes


def plain_output(subject: Subject, single: SingleToken, case: Case) -> Decoded:
    return plain_decode(
        single,
        seed=subject.seed,
        prompt_id=case.id,
        prompt=case.prompt,
        sampling=case.sampling,
        stop=case.stop,
    )


def _compare(
    subject: Subject, measure: Callable[[tuple[int, ...]], Passes], case: Case, decoded: Decoded
) -> _OutputComparison:
    """Compares each token with the one of plain decoding after the same tokens."""
    output, texts = decoded.output, list[str]()
    passes = measure((*case.prompt, *output[:-1]))
    for at, token in enumerate(output):
        prefix = (*case.prompt, *output[:at])
        last = len(prefix) - 1
        logits = processed(passes.rows[last], case.sampling, prefix)
        draw = target_draw(subject.seed, case.id, len(prefix))
        expected = reference_token(logits, case.sampling, draw)
        if token != expected:
            nearest = distance(logits, case.sampling, draw, token, float(passes.errors[last]))
            how = "a tie" if nearest.is_tie else "beyond"
            texts.append(
                f"{_difference(case, decoded, (*output[:at], expected), at)}, {nearest.kind}"
                f" {nearest.value:.1e} ({how} {nearest.allowance:.1e})"
            )
            if not nearest.is_tie:
                return _OutputComparison(texts, True, passes)
        ends = reference_reason(output[: at + 1], case.stop) is not None
        if ends != (at == len(output) - 1):
            texts.append(f"{case.label}, token {at + 1}: one output ends")
            return _OutputComparison(texts, True, passes)
    return _OutputComparison(texts, not output, passes)


def _difference(case: Case, decoded: Decoded, expected: Sequence[int], at: int) -> str:
    where = f"{case.label}, token {at}"
    if at >= min(len(decoded.output), len(expected)):
        return f"{where}: one output ends"
    return f"{where}: {decoded.output[at]} from {decoded.proposer(at)} instead of {expected[at]}"


def _limited(cfg: Mapping[str, Any]) -> dict[str, Any]:
    limited = dict(cfg)
    limit = cfg["data"]["limit"]
    limited["data"] = {**cfg["data"], "limit": min(limit or NUM_PROMPTS, NUM_PROMPTS)}
    limited["max_new_tokens"] = min(int(cfg["max_new_tokens"]), MAX_NEW_TOKENS)
    return limited


def exact_dtype(subject: Subject) -> Check:
    """Checks with ``model.exact=true`` that outputs in the configured dtype equal plain decoding.

    Plain decoding here is the preset ``ar`` on the same pair: on one device, or on the same
    tensor-parallel group, whose sums define the bits. There is no tolerance for ties.
    """
    model = subject.cfg["model"]
    if not model.get("exact"):
        return Check("exact_dtype", None, "model.exact=false: rounding may decide between tokens")
    if subject.claims is Lossless.LOSSY:
        return Check("exact_dtype", None, "a lossy output has no reference")
    data = {**subject.cfg["data"], "limit": NUM_EXACT_PROMPTS}
    pair, prompts, _ = prepare({**subject.cfg, "data": data, "max_new_tokens": 1})
    assert isinstance(pair, HuggingFacePair)
    room = (pair.max_positions or NUM_EXACT_TOKENS + _MAX_EXACT_PROMPT) - 1
    longest = min(_MAX_EXACT_PROMPT, max(1, room - NUM_EXACT_TOKENS))
    stop = StopRules(max_new_tokens=min(NUM_EXACT_TOKENS, room - longest))
    samplings = [GREEDY]
    if subject.claims is Lossless.TOKEN:
        samplings += [_EXACT_SAMPLING if subject.sampling.greedy else subject.sampling]
    cases = [
        Case(
            2 * prompt.id + number,
            f"prompt {prompt.id}, {'greedy' if params.greedy else 'sampled'}",
            tuple(prompt.tokens.tolist()[-longest:]),
            params,
            stop,
        )
        for prompt in prompts[:NUM_EXACT_PROMPTS]
        for number, params in enumerate(samplings)
    ]
    with subject.built(plain_config(subject.cfg), pair) as parts:
        expected = decode_cases(parts, cases)
    chunk = int(subject.cfg["prefill_chunk"])
    with subject.built(subject.cfg, pair) as parts:
        outputs = decode_cases(parts, cases, batch_size=subject.batch_size, prefill_chunk=chunk)
    compared = [(case, outputs[case.id], expected[case.id]) for case in cases]
    problems = [
        _difference(case, decoded, other.output, at)
        for case, decoded, other in compared
        if (at := first_difference(decoded.output, other.output)) is not None
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
