"""The reference of the checks: plain decoding, implemented independently of the decode loop.

Logits come from transformers' forward over the whole sequence, random numbers from a second
implementation of the generator on Python integers, and top-k and top-p from their definitions on a
sorted row. Stop rules are evaluated on the whole output after each token.

``differences`` compares each output token with plain decoding after the same prefix. In low
precision, passes of many rows round otherwise than passes of one row. A different token is a *tie*
if the measured rounding can explain it (``Distance``), otherwise a fault.

Shape letters: V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import NoRepeatNGramLogitsProcessor

from specdec.certify.cases import Case, Decoded
from specdec.device import on_host
from specdec.metrics.compare import first_difference
from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingParams
from specdec.state import RequestState, StopRules
from specdec.types import NO_NODE, FloatArray

_WORD = 2**64 - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Returns four random 64-bit words by Philox4x64-10 (Salmon et al. 2011, section 3.3)."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, c = (right >> 64) ^ b ^ first, (left >> 64) ^ d ^ second
        b, d = right & _WORD, left & _WORD
        first = (first + 0x9E3779B97F4A7C15) & _WORD
        second = (second + 0xBB67AE8584CAA73B) & _WORD
    return a, b, c, d


def reference_draw(
    seed: int, prompt_id: int, position: int, purpose: int = 0, index: int = 0
) -> float:
    """Returns the random number in [0, 1) that ``KeyedDraws`` must give for these arguments."""
    counter = (position // 4 + 1, index, purpose, 0)  # numpy counts up before it draws
    word = philox(counter, (seed & _WORD, prompt_id & _WORD))[position % 4]
    return (word >> 11) / 2.0**53


def processed(logits: FloatArray, params: SamplingParams, history: Sequence[int]) -> FloatArray:
    """Returns float64[V], the logits after no_repeat_ngram and the configured processors."""
    processors = [*params.processors]
    if params.no_repeat_ngram:
        processors.insert(0, NoRepeatNGramLogitsProcessor(params.no_repeat_ngram))
    ids = torch.tensor([list(history)])
    scores = torch.from_numpy(np.array(logits, np.float64))[None]
    for processor in processors:
        scores = processor(ids, scores.clone())  # type: ignore[arg-type]
    return scores[0].numpy()


def reference_probs(logits: FloatArray, params: SamplingParams) -> FloatArray:
    """Returns float64[V], probabilities after temperature, top-k and top-p; one-hot if greedy.

    Top-k keeps all tokens that tie with the k-th. Of equal logits at the top-p boundary, top-p
    keeps those of lower token id. ``logits`` are float64[V] after the processors.
    """
    if params.temperature == 0.0:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    scaled = logits / params.temperature
    if params.top_k and params.top_k < len(scaled):
        kth = np.sort(scaled)[-params.top_k]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    weights = np.exp(scaled - scaled.max())
    probs = weights / weights.sum()
    if params.top_p < 1.0:
        order = np.argsort(-scaled, kind="stable")  # of equal logits the lower id first
        mass_before = np.append(0.0, probs[order].cumsum()[:-1])
        probs[order[mass_before >= params.top_p]] = 0.0
        probs /= probs.sum()
    return probs


def reference_token(logits: FloatArray, params: SamplingParams, draw: float) -> int:
    """Returns the token whose CDF interval (in id order) contains ``draw``; greedy: the argmax."""
    return token_at(reference_probs(logits, params), draw)


def token_at(probs: FloatArray, draw: float) -> int:
    last = int(np.flatnonzero(probs)[-1])  # where rounding leaves the CDF below the draw
    return min(int(probs.cumsum().searchsorted(draw, side="right")), last)


def rejection_verdict(request: RequestState, seed: int) -> tuple[list[int], int]:
    """Returns the ids of the accepted nodes, and the next token, by recursive rejection sampling of
    a request's answered tree (Jeon et al. 2024).
    """
    tree, slot, path = request.tree, 0, list[int]()
    while True:
        node, at = int(tree.ids[slot]), int(tree.positions[slot]) + 1
        children, token = np.flatnonzero(tree.parents == slot), int(tree.answers[slot])
        child = NO_NODE
        if len(children):
            rows = [on_host(p[node]).astype(float) for p in (tree.target_probs, tree.draft_probs)]
            size = max(map(len, rows))
            target, draft = (np.pad(row, (0, size - len(row))) for row in rows)
            for index, child in enumerate(children.tolist()):
                token = int(tree.tokens[child])
                test = reference_draw(seed, request.id, at, Purpose.ACCEPT, index)
                if test * draft[token] < target[token]:
                    break
                target = np.maximum(target - draft, 0.0)
                target, draft[token] = target / (target.sum() or 1.0), 0.0
                draft /= draft.sum() or 1.0
            else:
                draw = reference_draw(seed, request.id, at, Purpose.RESIDUAL)
                token = token_at(target, draw)
                child = tree.child(slot, token)
        if child == NO_NODE or not tree.answered[child]:
            return path, token
        path.append(int(tree.ids[child]))
        slot = child


def reference_reason(output: Sequence[int], stop: StopRules) -> str | None:
    """Returns why ``output`` is complete ("eos", "stop_string", "length"); None if it is not."""
    if output[-1] in stop.eos_ids:
        return "eos"
    if stop.stop_strings and stop.decode is not None:
        text = stop.decode(output)
        if any(s in text for s in stop.stop_strings):
            return "stop_string"
    return "length" if len(output) >= stop.max_new_tokens else None


def forward(model: torch.nn.Module, tokens: Sequence[int], **options: Any) -> Any:
    """Returns the output of transformers' own forward over a sequence."""
    row = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    with torch.inference_mode():
        return model(row, **options)


def whole_pass(model: torch.nn.Module, tokens: Sequence[int]) -> FloatArray:
    """Returns float64[T, V], the logits after each token, from one forward without a cache."""
    logits = forward(model, tokens, use_cache=False).logits[0]
    rows: FloatArray = logits.to(torch.float64).cpu().numpy()
    return rows


class Oracle:
    """Decodes with transformers' own forward, without a cache, and random numbers of ``seed``."""

    def __init__(self, model: torch.nn.Module, *, seed: int) -> None:
        self._model, self._seed = model, seed

    def decode(self, case: Case) -> Decoded:
        return plain_decode(lambda t: whole_pass(self._model, t)[-1], case, self._seed)

    def differences(self, case: Case, decoded: Decoded | None) -> list[Difference]:
        """Returns the first difference of ``decoded`` from plain decoding, or an empty list."""
        if decoded is None:
            return [Difference(0, "the request was lost")]
        rows = whole_pass(self._model, (*case.prompt, *decoded.output[:-1]))
        return [*differences(case, decoded, rows[len(case.prompt) - 1 :], seed=self._seed)]


def plain_decode(
    logits_of: Callable[[tuple[int, ...]], FloatArray], case: Case, seed: int
) -> Decoded:
    """Decodes a case; ``logits_of`` maps a sequence to float64[V], logits of the next token."""
    tokens, output = list(case.prompt), list[int]()
    while True:
        logits = processed(logits_of(tuple(tokens)), case.sampling, tokens)
        draw = reference_draw(seed, case.id, len(tokens))
        output.append(reference_token(logits, case.sampling, draw))
        tokens.append(output[-1])
        reason = reference_reason(output, case.stop)
        if reason is not None:
            return Decoded(tuple(output), reason)


@dataclass(frozen=True, slots=True)
class Difference:
    at: int  # index in the output
    text: str
    is_tie: bool = False


def differences(
    case: Case,
    decoded: Decoded,
    rows: FloatArray,
    *,
    seed: int,
    errors: FloatArray | None = None,
    tokens: bool = True,
) -> Iterator[Difference]:
    """Yields differences from plain decoding, up to and including the first that is no tie.

    Args:
        rows: float64[T, V], the logits of plain decoding for each output token.
        errors: float64[T], bounds of rounding errors of logits, which explain ties; None: no ties.
        tokens: whether tokens must equal those of plain decoding, not just have a probability > 0.
    """
    output, params = decoded.output, case.sampling
    if not output:
        yield Difference(0, "the output is empty")
    for at, token in enumerate(output):
        prefix = (*case.prompt, *output[:at])
        logits, fault, is_tie = processed(rows[at], params, prefix), "", False
        error = 0.0 if errors is None else float(errors[at])
        if tokens:
            draw = reference_draw(seed, case.id, len(prefix))
            if (expected := reference_token(logits, params, draw)) != token:
                nearest = distance(logits, params, draw, token, error)
                is_tie = errors is not None and nearest.is_tie
                fault = f" instead of {expected}, {nearest.kind} {nearest.value:.1e}"
                if errors is not None:
                    fault += f" ({'a tie' if is_tie else 'beyond'} {nearest.allowance:.1e})"
        elif reference_probs(logits, params)[token] == 0.0:
            is_tie = errors is not None and bool(_weights(logits, params, error)[1][token] > 0.0)
            fault = ", which cannot be" + (" without rounding" if is_tie else "")
        if fault:
            text = f"output token {at} is {token} from {decoded.proposer(at)}{fault}"
            yield Difference(at, text, is_tie)
            if not is_tie:
                return
        reason, last = reference_reason(output[: at + 1], case.stop), at == len(output) - 1
        if (reason is not None) != last:
            how = "the end instead of a token" if last else "there instead of the end"
            yield Difference(at + 1, f"output token {at + 1} is {how}")
            return
        if last and decoded.reason != reason:
            yield Difference(at, f"ended by {decoded.reason} instead of {reason}")


def unequal(
    cases: Sequence[Case],
    outputs: Mapping[int, Decoded],
    expected: Mapping[int, Decoded],
    where: str = "",
) -> Iterator[str]:
    """Yields the first difference of each case's output from that in ``expected``."""
    for case in cases:
        decoded, other = outputs.get(case.id, Decoded((), None)), expected[case.id].output
        at = first_difference(decoded.output, other)
        if at is not None:
            found, right = ([*t, "the end"][min(at, len(t))] for t in (decoded.output, other))
            who = f" from {decoded.proposer(at)}" if at < len(decoded.output) else ""
            yield f"{case.label}{where}: output token {at} is {found}{who} instead of {right}"


@dataclass(frozen=True, slots=True)
class Distance:
    """How far plain decoding was from choosing another token."""

    kind: str  # a gap of logits if greedy, else a distance of the draw
    value: float
    allowance: float  # values up to this one can be explained by rounding

    @property
    def is_tie(self) -> bool:
        return self.value <= self.allowance


def distance(
    logits: FloatArray, params: SamplingParams, draw: float, token: int, error: float
) -> Distance:
    """Returns the distance for ``token``, which the strategy chose. ``logits`` are float64[V] after
    the processors, each known up to ``error``; ``draw`` is the random number of plain decoding.
    """
    if params.greedy:
        return Distance("top-two gap", float(logits.max() - logits[token]), 2.0 * error)
    probs = reference_probs(logits, params)
    high = float(probs.cumsum()[token])
    low = high - float(probs[token])
    kind = "CDF edge" if probs[token] > 0.0 else "filter boundary and CDF edge"
    lowest, highest = np.inf, -np.inf  # bounds of the token's part for logits within ``error``
    least, most = _weights(logits, params, error)
    if most[token] > 0.0:
        lowest = float(_share(least[:token].sum(), most[token:].sum()))
        highest = float(_share(most[: token + 1].sum(), least[token + 1 :].sum()))
    if draw < low:
        return Distance(kind, low - draw, low - lowest)
    return Distance(kind, max(draw - high, 0.0), highest - high)


def _weights(
    logits: FloatArray, params: SamplingParams, error: float
) -> tuple[FloatArray, FloatArray]:
    """Returns lower and upper bounds, float64[V] each, of unnormalised probabilities where logits
    change by up to ``error``; 0 for tokens that top-k or top-p then may, or must, remove.
    """
    weights = np.exp((logits - logits.max()) / params.temperature)
    swing = np.exp(min(error / params.temperature, 50.0))
    least, most = weights / swing, weights * swing
    if 0 < params.top_k < len(logits):
        kth = np.sort(logits)[-params.top_k]
        least[logits <= kth + 2.0 * error] = 0.0
        most[logits < kth - 2.0 * error] = 0.0
    if params.top_p < 1.0:
        order = np.argsort(-logits, kind="stable")
        descending = -logits[order]
        least_to, most_to = (np.append(0.0, w[order].cumsum()) for w in (least, most))
        # Number of tokens that certainly and that possibly rank above each token.
        sure = np.searchsorted(descending, -logits - 2.0 * error, side="left")
        maybe = np.searchsorted(descending, -logits + 2.0 * error, side="right")
        lowest = _share(least_to[sure], most_to[-1] - most_to[sure])
        highest = _share(most_to[maybe] - most, least_to[-1] - least_to[maybe] + least)
        least[highest >= params.top_p], most[lowest >= params.top_p] = 0.0, 0.0
    return least, most


def _share(part: Any, rest: Any) -> Any:
    return part / np.maximum(part + rest, 1e-300)
