"""Check (c): the configured models in the configured precision; ties are told from faults.

Batched and single-token passes round differently, so outputs may part where two tokens are equally
good up to rounding. At the first difference of each prompt the distance to the other choice is
held against what batching was measured to change: within it the difference is a *tie*, beyond it a
fault.

Shape letters: V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec.certify.cases import GREEDY, Case
from specdec.certify.oracle import plain_decode, processed, reference_probs, target_draw
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import Decoded, Subject, decode_cases
from specdec.metrics.parity import first_difference
from specdec.pairs import HuggingFacePair
from specdec.runs.jobs import prepare, stop_rules
from specdec.sampling.transform import SamplingParams
from specdec.types import BoolArray, FloatArray, Lossless

NUM_PROMPTS = 3
MAX_NEW_TOKENS = 24
_MAX_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Distance:
    """How near plain decoding came to another choice.

    Attributes:
        kind: top-two gap (in logits), or CDF edge (in probability), which for a token that a
            filter cut is also a filter boundary.
        value: the distance.
        allowance: what rounding may bridge, in the same unit.
    """

    kind: str
    value: float
    allowance: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding may have decided."""
        return self.value <= self.allowance


class SingleToken:
    """A model fed one token at a time, with transformers' own cache: what plain decoding computes.

    Attributes:
        rows: per position the logits after it, float64[V].
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: list[FloatArray] = []
        self._model = model
        self._cache: Any = None

    def __call__(self, tokens: tuple[int, ...]) -> FloatArray:
        """float64[V] after ``tokens``, which must go on from the call before."""
        device = next(self._model.parameters()).device
        with torch.inference_mode():
            for token in tokens[len(self.rows) :]:
                out = self._model(
                    torch.tensor([[token]], device=device),
                    past_key_values=self._cache,
                    use_cache=True,
                )
                self._cache = out.past_key_values
                self.rows.append(out.logits[0, -1].to(torch.float64).cpu().numpy())
        return self.rows[-1]


def batching_error(
    model: PreTrainedModel, tokens: tuple[int, ...], rows: list[FloatArray]
) -> float:
    """Largest difference between logits of one pass over all tokens and of single-token passes."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)], device=device), use_cache=False)
    batched = out.logits[0].to(torch.float64).cpu().numpy()
    return float(np.abs(batched - np.stack(rows[: len(tokens)])).max())


def distance(
    logits: FloatArray, params: SamplingParams, draw: float, token: int, error: float
) -> Distance:
    """How far plain decoding was from choosing ``token``.

    Args:
        logits: float64[V], processors applied.
        params: temperature and filters.
        draw: the uniform draw.
        token: what the strategy chose instead.
        error: how much batching changes a logit.
    """
    if params.greedy:
        return Distance("top-two gap", float(logits.max() - logits[token]), 2.0 * error)
    probs = reference_probs(logits, params)
    cdf = probs.cumsum()
    low, high = float(cdf[token] - probs[token]), float(cdf[token])
    lowest, highest = _reach(logits, params, token, error)
    kind = "CDF edge" if probs[token] > 0.0 else "filter boundary and CDF edge"
    if draw < low:
        return Distance(kind, low - draw, low - lowest)
    return Distance(kind, max(draw - high, 0.0), highest - high)


def _reach(
    logits: FloatArray, params: SamplingParams, token: int, error: float
) -> tuple[float, float]:
    """The lowest and highest place of ``token``'s share of the CDF, for logits within ``error``.

    A token near the edge of a filter may be in or out. One that cannot be in has no place.
    """
    certain, possible = _kept(logits, params, error)
    if not possible[token]:
        return np.inf, -np.inf
    least, most = _weights(logits, params, error, certain, possible)
    lowest = _share(least[:token].sum(), most[token:].sum())
    highest = _share(most[: token + 1].sum(), least[token + 1 :].sum())
    return lowest, highest


def _weights(
    logits: FloatArray,
    params: SamplingParams,
    error: float,
    certain: BoolArray,
    possible: BoolArray,
) -> tuple[FloatArray, FloatArray]:
    """(least, most) unnormalised probability of each token, float64[V]; 0 where it is out."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    swing = np.exp(min(error / params.temperature, 50.0))
    return np.where(certain, weights / swing, 0.0), np.where(possible, weights * swing, 0.0)


def _share(part: float, rest: float) -> float:
    return float(part / max(part + rest, 1e-300))


def _kept(logits: FloatArray, params: SamplingParams, error: float) -> tuple[BoolArray, BoolArray]:
    """(tokens that the filters keep, that they may keep), bool[V], for logits within ``error``."""
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
    # Mass before a token: of those that surely stand before it, of those that may.
    sure = np.searchsorted(descending, -logits - 2.0 * error, side="left")
    maybe = np.searchsorted(descending, -logits + 2.0 * error, side="right")
    for token in range(len(logits)):
        lowest = _share(least_to[sure[token]], most_to[-1] - most_to[sure[token]])
        before = most_to[maybe[token]] - most[token]
        after = least_to[-1] - least_to[maybe[token]] + least[token]
        certain[token] = certain[token] and _share(before, after) < params.top_p
        possible[token] = possible[token] and lowest < params.top_p
    return certain, possible


def numerics(subject: Subject) -> Check:
    """(c) First divergence per prompt, with its distance against the error of batching."""
    kind = subject.cfg["model"]["kind"]
    if kind not in ("pretrained", "random"):
        return Check("numerics", None, f"model={kind} has no logits")
    cfg = _limited(subject.cfg)
    pair, prompts, _ = prepare(cfg)
    assert isinstance(pair, HuggingFacePair)
    params = subject.sampling if subject.exact_tokens else GREEDY
    stop = stop_rules(cfg, pair)
    cases = [
        Case(p.id, f"prompt {p.id}", tuple(p.tokens.tolist()[-_MAX_PROMPT_TOKENS:]), params, stop)
        for p in prompts
    ]
    parts = subject.build(cfg, pair)
    try:
        found = decode_cases(
            parts,
            cases,
            batch_size=subject.batch_size,
            prefill_chunk=int(cfg["prefill_chunk"]),
        )
    finally:
        parts.executor.shutdown()
    outcomes = [_compare(subject, pair.target, case, found[case.id]) for case in cases]
    if subject.claims is Lossless.LOSSY:
        return _lossy(outcomes)
    error = max(o.error for o in outcomes)
    ties = [o.text for o in outcomes if o.text and o.tied]
    faults = [o.text for o in outcomes if o.text and not o.tied]
    measured = f"batched and single-token logits differ by up to {error:.1e}"
    label = f"{cfg['model'].get('dtype')}, {len(cases)} prompts"
    if faults:
        return Check("numerics", False, f"{label}: {joined_details(faults)}; {measured}")
    equal = f"{len(cases) - len(ties)} equal plain decoding"
    words = f"{len(ties)} ties: {joined_details(ties)}" if ties else "no ties"
    return Check("numerics", True, f"{label}: {equal}, {words}; {measured}")


def _lossy(outcomes: list[_Outcome]) -> Check:
    """What a lossy verifier changes on the configured models."""
    texts = [o.text for o in outcomes if o.text]
    if not texts:
        detail = f"{len(outcomes)} prompts happen to equal plain decoding"
        return Check("numerics", None, detail)
    detail = f"lossy: {len(texts)} of {len(outcomes)} prompts differ; {joined_details(texts)}"
    return Check("numerics", False, detail)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One prompt's comparison; an empty text where the outputs are equal."""

    text: str
    tied: bool
    error: float


def _compare(subject: Subject, model: PreTrainedModel, case: Case, found: Decoded) -> _Outcome:
    single = SingleToken(model)
    expected = plain_decode(
        single,
        seed=subject.seed,
        prompt_id=case.id,
        prompt=case.prompt,
        sampling=case.sampling,
        stop=case.stop,
    )
    sequence = (*case.prompt, *expected.output[:-1])
    error = batching_error(model, sequence, single.rows)
    at = first_difference(found.output, expected.output)
    if at is None:
        return _Outcome("", True, error)
    there = f"{case.label}, token {at}"
    if at >= len(found.output) or at >= len(expected.output):
        return _Outcome(f"{there}: one output ends", False, error)
    prefix = (*case.prompt, *expected.output[:at])
    logits = processed(single.rows[len(prefix) - 1], case.sampling, prefix)
    draw = target_draw(subject.seed, case.id, len(prefix))
    nearest = distance(logits, case.sampling, draw, found.output[at], error)
    text = (
        f"{there}: {found.output[at]} instead of {expected.output[at]}, {nearest.kind}"
        f" {nearest.value:.1e} ({'a tie' if nearest.is_tie else 'beyond'} {nearest.allowance:.1e})"
    )
    return _Outcome(text, nearest.is_tie, error)


def _limited(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as it is, on a few prompts and tokens."""
    limited = dict(cfg)
    limit = cfg["data"]["limit"]
    limited["data"] = {**cfg["data"], "limit": min(limit or NUM_PROMPTS, NUM_PROMPTS)}
    limited["max_new_tokens"] = min(int(cfg["max_new_tokens"]), MAX_NEW_TOKENS)
    return limited
