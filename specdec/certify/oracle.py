"""The reference that everything is held against: plain decoding, token by token, written anew.

Nothing here is shared with what it judges: logits are transformers' own forward over the whole
sequence, draws are a second implementation of the keyed generator in plain integers, filters are
the definitions of top-k and top-p over a sorted row, stop rules look at the whole output.

Shape letters: V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.types import FloatArray

LogitsOf = Callable[[tuple[int, ...]], FloatArray]
"""A sequence -> float64[V], the logits of its next token."""

_WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011, section 3.3) on Python integers."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (right >> 32) ^ b ^ first,
            right & _WORD,
            (left >> 32) ^ d ^ second,
            left & _WORD,
        )
        first, second = (first + 0x9E3779B9) & _WORD, (second + 0xBB67AE85) & _WORD
    return a, b, c, d


def target_draw(seed: int, prompt_id: int, position: int) -> float:
    """The uniform draw of the target's token at an absolute position."""
    counter = (position & _WORD, 0, prompt_id & _WORD, (prompt_id >> 32) & _WORD)
    high, low, _, _ = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return ((high << 21) | (low >> 11)) / 2.0**53


def processed(logits: FloatArray, params: SamplingParams, history: Sequence[int]) -> FloatArray:
    """float64[V]: logits after no_repeat_ngram and the other processors."""
    logits = np.array(logits, np.float64)
    size = params.no_repeat_ngram
    if size:
        tail = tuple(history[len(history) - size + 1 :])
        for start in range(len(history) - size + 1):
            gram = tuple(history[start : start + size])
            if gram[:-1] == tail:
                logits[gram[-1]] = -np.inf
    for processor in params.processors:
        ids = torch.tensor([list(history)])
        scores = processor(ids, torch.from_numpy(logits)[None].clone())  # type: ignore[arg-type]
        logits = scores[0].numpy()
    return logits


def reference_probs(logits: FloatArray, params: SamplingParams) -> FloatArray:
    """float64[V]: temperature, top-k with all ties of the k-th, top-p; one-hot if greedy.

    Of equal logits at the edge of top-p the lower token ids stay.

    Args:
        logits: float64[V], processors applied.
        params: temperature and filters.
    """
    if params.temperature == 0.0:
        probs = np.zeros(len(logits))
        probs[int(np.flatnonzero(logits == logits.max())[0])] = 1.0
        return probs
    scaled = logits / params.temperature
    if params.top_k and params.top_k < len(scaled):
        kth = np.sort(scaled)[-params.top_k]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    weights = np.exp(scaled - scaled.max())
    probs = weights / weights.sum()
    if params.top_p < 1.0:
        order = sorted(range(len(probs)), key=lambda token: (-scaled[token], token))
        mass, kept = 0.0, np.zeros(len(probs), np.bool_)
        for token in order:
            if mass >= params.top_p:
                break
            kept[token] = True
            mass += probs[token]
        probs = np.where(kept, probs, 0.0)
        probs = probs / probs.sum()
    return probs


def reference_token(logits: FloatArray, params: SamplingParams, draw: float) -> int:
    """The token at ``draw`` of the CDF in token-id order; the first best one if greedy."""
    probs = reference_probs(logits, params)
    mass = 0.0
    last = 0
    for token in np.flatnonzero(probs).tolist():
        mass += probs[token]
        last = token
        if draw < mass:
            return int(token)
    return last


def reference_reason(output: Sequence[int], stop: StopRules) -> str | None:
    """Why the output is complete, looking at all of it; None where it is not."""
    if output[-1] in stop.eos_ids:
        return "eos"
    if stop.stop_strings and stop.decode is not None:
        text = stop.decode(output)
        if any(s in text for s in stop.stop_strings):
            return "stop_string"
    return "length" if len(output) >= stop.max_new_tokens else None


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain decoding gives.

    Attributes:
        output: tokens.
        reason: why it ended.
    """

    output: tuple[int, ...]
    reason: str


class Oracle:
    """Plain decoding with transformers' own forward, no cache, one token at a time."""

    def __init__(self, model: torch.nn.Module, *, seed: int) -> None:
        """Takes the target model as transformers made it.

        Args:
            model: a causal language model.
            seed: of the run, which keys the draws.
        """
        self._model = model
        self._seed = seed
        self._known: dict[tuple[int, ...], FloatArray] = {}

    def logits(self, tokens: tuple[int, ...]) -> FloatArray:
        """float64[V] after ``tokens``, by a forward over the whole sequence."""
        found = self._known.get(tokens)
        if found is None:
            device = next(self._model.parameters()).device
            with torch.inference_mode():
                out = self._model(torch.tensor([list(tokens)], device=device), use_cache=False)
            found = out.logits[0, -1].to(torch.float64).cpu().numpy()
            self._known[tokens] = found
        return found

    def decode(
        self, *, prompt_id: int, prompt: Sequence[int], sampling: SamplingParams, stop: StopRules
    ) -> Reference:
        """Decodes one prompt."""
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
) -> Reference:
    """Autoregressive decoding by any source of logits."""
    tokens, output = list(prompt), list[int]()
    while True:
        logits = processed(logits_of(tuple(tokens)), sampling, tokens)
        draw = target_draw(seed, prompt_id, len(tokens))
        token = reference_token(logits, sampling, draw)
        tokens.append(token)
        output.append(token)
        reason = reference_reason(output, stop)
        if reason is not None:
            return Reference(tuple(output), reason)
