"""The reference of the checks: plain decoding, implemented independently of the decode loop.

Logits come from transformers' forward over the whole sequence, draws from a second implementation
of the keyed generator on Python integers, and top-k and top-p from their definitions on a sorted
row. Stop rules are evaluated on the whole output after each token.

Shape letters: V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import NoRepeatNGramLogitsProcessor

from specdec.certify.cases import Decoded
from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.types import FloatArray

LogitsOf = Callable[[tuple[int, ...]], FloatArray]
"""Maps a sequence to float64[V], the logits of its next token."""

_WORD = 2**64 - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Computes Philox4x64-10 (Salmon et al. 2011, section 3.3) on Python integers."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (
            (right >> 64) ^ b ^ first,
            right & _WORD,
            (left >> 64) ^ d ^ second,
            left & _WORD,
        )
        first = (first + 0x9E3779B97F4A7C15) & _WORD
        second = (second + 0xBB67AE8584CAA73B) & _WORD
    return a, b, c, d


def target_draw(seed: int, prompt_id: int, position: int) -> float:
    return reference_draw(seed, prompt_id, position, purpose=0, index=0)


def reference_draw(seed: int, prompt_id: int, position: int, purpose: int, index: int) -> float:
    """Returns the uniform draw of a key of ``KeyedDraws``; each counter value yields four draws."""
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
    """Returns the token at ``draw`` of the CDF in token-id order; if greedy, the first argmax."""
    probs = reference_probs(logits, params)
    last = int(np.flatnonzero(probs)[-1])  # where rounding leaves the CDF below the draw
    return min(int(probs.cumsum().searchsorted(draw, side="right")), last)


def reference_reason(output: Sequence[int], stop: StopRules) -> str | None:
    """Returns why ``output`` is complete; None if it is not."""
    if output[-1] in stop.eos_ids:
        return "eos"
    if stop.stop_strings and stop.decode is not None:
        text = stop.decode(output)
        if any(s in text for s in stop.stop_strings):
            return "stop_string"
    return "length" if len(output) >= stop.max_new_tokens else None


class Oracle:
    """Decodes with transformers' own forward, without a cache; ``seed`` keys the draws."""

    def __init__(self, model: torch.nn.Module, *, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._cached: dict[tuple[int, ...], FloatArray] = {}

    def logits(self, tokens: tuple[int, ...]) -> FloatArray:
        """Returns float64[V], the logits after ``tokens``, from a forward over all of them."""
        if tokens not in self._cached:
            device = next(self._model.parameters()).device
            with torch.inference_mode():
                out = self._model(torch.tensor([list(tokens)], device=device), use_cache=False)
            self._cached[tokens] = out.logits[0, -1].to(torch.float64).cpu().numpy()
        return self._cached[tokens]

    def decode(
        self, *, prompt_id: int, prompt: Sequence[int], sampling: SamplingParams, stop: StopRules
    ) -> Decoded:
        return plain_decode(
            self.logits,
            seed=self._seed,
            prompt_id=prompt_id,
            prompt=prompt,
            sampling=sampling,
            stop=stop,
        )


def plain_decode(
    logits_of: LogitsOf,
    *,
    seed: int,
    prompt_id: int,
    prompt: Sequence[int],
    sampling: SamplingParams,
    stop: StopRules,
) -> Decoded:
    tokens, output = list(prompt), list[int]()
    while True:
        logits = processed(logits_of(tuple(tokens)), sampling, tokens)
        draw = target_draw(seed, prompt_id, len(tokens))
        token = reference_token(logits, sampling, draw)
        tokens.append(token)
        output.append(token)
        reason = reference_reason(output, stop)
        if reason is not None:
            return Decoded(tuple(output), reason)
