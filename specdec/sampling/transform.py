"""The sampling transform, from logits to the sampled distribution; the same for target and draft.

Steps and their order are those of transformers' ``generate``: no_repeat_ngram, other processors,
temperature, top-k, top-p. Probabilities are float64 from the temperature on.

Shape letters: A rows (answered nodes), W rows (expanded nodes), V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from specdec.device import Probs, to_host
from specdec.parts.fields import Limit, PositiveShare, expects, validated
from specdec.sampling import host, large_rows, on_device
from specdec.sampling.filters import check_finite
from specdec.sampling.host import Distribution
from specdec.sampling.on_device import Weighted, on_accelerator
from specdec.sampling.processors import LogitsProcessor, apply_processors, repeated_ngrams
from specdec.types import FloatArray, IntArray

_TEMPERATURE = (
    "it must be 0 for greedy decoding, or a number such as 0.8 of at least 1e-6: a smaller one"
    " overflows 32-bit logits"
)
_COLDEST = 1e-6  # draws differ from greedy ones only where float32 logits are equal or adjacent


def _not_tiny(temperature: float) -> float:
    if 0 < temperature < _COLDEST:
        raise ValueError
    return temperature


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the target's logits.

    Attributes:
        temperature: 0 is greedy: the most probable token, of equal ones the lowest token id; top_k
            and top_p then have no effect.
        top_k: keep the k most probable tokens, including all that tie with the k-th; 0 disables it.
        top_p: keep the smallest set of most probable tokens with at least this mass; 1 disables it.
        no_repeat_ngram: ban tokens that would repeat an n-gram of this size in prompt and output; 0
            disables it.
        processors: Hugging Face logits processors, applied before the temperature.

    Raises:
        ValueError: for a value outside its range.
    """

    temperature: Annotated[
        float, Field(ge=0, lt=1e6), AfterValidator(_not_tiny), expects(_TEMPERATURE)
    ] = 0.0
    top_k: Limit = 0
    top_p: PositiveShare = 1.0
    no_repeat_ngram: Limit = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.processors, tuple) or not all(map(callable, self.processors)):
            raise ValueError(
                f"processors={self.processors!r} is not allowed: give a tuple of Hugging Face"
                " logits processors, e.g. (RepetitionPenaltyLogitsProcessor(1.1),)"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen instead of a random one."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the transform needs the tokens before the sampled one."""
        return bool(self.no_repeat_ngram or self.processors)


class SamplingTransform:
    """Applies ``SamplingParams`` to logits.

    In every method, logits are [A, V] tensors of any float type and device, and ``histories[i]`` is
    the int64 sequence up to and including the node of row i; None is allowed if
    ``params.needs_history`` is false. Results do not depend on which rows share a call. Logits on
    an accelerator, and distributions computed from them, stay there.

    Attributes:
        params: the parameters to apply.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._filters: dict[str, Any] = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }

    def probs(self, logits: Tensor, histories: Sequence[IntArray] | None = None) -> Probs:
        """Returns the processed distribution, float64[A, V]; one-hot at the argmax if greedy."""
        return self.distribution(logits, histories).probs()

    def sample(
        self, logits: Tensor, uniforms: FloatArray, histories: Sequence[IntArray] | None = None
    ) -> IntArray:
        """Returns the token at ``uniforms``[A] of each row's CDF, int64[A].

        Greedy: the argmax, whatever the uniforms, which may be empty.
        """
        if self.params.greedy:
            return self.greedy(logits, histories)
        if not len(logits):
            return np.zeros(0, np.int64)
        logits, module = self._processed(logits, histories)
        tokens: IntArray = module.sample(logits, uniforms, **self._filters)
        return tokens

    def greedy(self, logits: Tensor, histories: Sequence[IntArray] | None = None) -> IntArray:
        """Returns the first of the largest processed logits of each row, int64[A]."""
        logits, module = self._processed(logits, histories)
        best: IntArray = module.argmax(logits)
        return best

    def distribution(
        self, logits: Tensor, histories: Sequence[IntArray] | None = None
    ) -> Distribution | Weighted:
        """Returns the processed distribution on its support, for draws and for ``probs()``."""
        return self._weighed(logits, histories, self._filters)

    def proposal_probs(self, logits: Tensor, histories: Sequence[IntArray] | None = None) -> Probs:
        """Returns the distribution that a draft samples candidates from, float64[W, V]."""
        return self.proposal(logits, histories).probs()

    def proposal(
        self, logits: Tensor, histories: Sequence[IntArray] | None = None
    ) -> Distribution | Weighted:
        """Returns the distribution that a draft samples candidates from, on its support.

        This is the processed distribution; if greedy, the model's own at temperature 1, because the
        processed one has a single token and cannot propose siblings. Rejection sampling is lossless
        for any distribution, as long as the candidates were sampled from it.
        """
        filters = {"temperature": 1.0} if self.params.greedy else self._filters
        return self._weighed(logits, histories, filters)

    def top(
        self, logits: Tensor, k: int, histories: Sequence[IntArray] | None = None
    ) -> tuple[IntArray, FloatArray]:
        """Returns the most probable draft candidates of each row.

        Processors and temperature (1 if greedy) are applied, so that scores estimate the
        probability that the target draws the token; top-k and top-p are not.

        Args:
            logits: [W, V].
            k: number of candidates per row, reduced to at most V.
            histories: as in the class.

        Returns:
            tokens int64[W, K], best first, ties in token-id order; log probabilities float64[W, K],
            <= 0; -inf for tokens that a processor bans, which are not candidates.
        """
        k = min(k, logits.shape[1])
        if not len(logits):
            return np.zeros((0, k), np.int64), np.zeros((0, k))
        logits, module = self._processed(logits, histories)
        temperature = self.params.temperature or 1.0
        if module is host and large_rows.serves(logits.numpy()):
            tokens, logprobs = host.top_of_large(logits, k, temperature)
            return tokens, np.minimum(logprobs, 0.0)
        if temperature != 1.0:
            logits = logits / temperature
        # Few calls: a pass of a small draft leaves some 100 us for sampling.
        scores = torch.log_softmax(logits, dim=1)
        if module is host:
            return host.top_one(scores) if k == 1 else host.top(scores, k)
        best = scores.topk(min(k + 1, logits.shape[1]), dim=1)
        tokens, logprobs = _on_host(best.indices, best.values)
        check_finite(logprobs[:, 0])
        # topk does not specify their order
        if np.count_nonzero(logprobs[:, 1:] == logprobs[:, :-1]):
            tokens, logprobs = _on_host(*on_device.top(scores, k))
        return tokens[:, :k], np.minimum(logprobs[:, :k], 0.0, dtype=np.float64)

    def _weighed(
        self, logits: Tensor, histories: Sequence[IntArray] | None, filters: dict[str, Any]
    ) -> Distribution | Weighted:
        if not len(logits):
            return Distribution(None, np.zeros(logits.shape), logits.shape[1])
        logits, module = self._processed(logits, histories)
        weighed: Distribution | Weighted
        if filters["temperature"] == 0.0:
            weighed = module.one_hot(logits)
        else:
            weighed = module.weigh(logits, **filters)
        return weighed

    def _processed(
        self, logits: Tensor, histories: Sequence[IntArray] | None
    ) -> tuple[Tensor, ModuleType]:
        """Applies processors.

        Returns:
            [A, V] in float32 or float64, the input unchanged; the module that samples from them.
        """
        # Right after a pass, whose weights have taken the caches, each use of a tensor takes
        # microseconds even where it changes nothing.
        if logits.requires_grad:
            logits = logits.detach()
        module: ModuleType = host
        if on_accelerator(logits):
            module = on_device
        elif not logits.is_cpu:
            logits = logits.cpu()
        if (dtype := logits.dtype) is not torch.float32 and dtype is not torch.float64:
            logits = logits.float()
        params = self.params
        if not params.needs_history:
            return logits, module
        assert histories is not None, "these sampling parameters need histories"
        if params.no_repeat_ngram:
            rows, tokens = repeated_ngrams(histories, params.no_repeat_ngram)
            inside = tokens < logits.shape[1]
            logits = logits.clone()
            logits[rows[inside], tokens[inside]] = -torch.inf
        if params.processors:
            logits = apply_processors(params.processors, logits, histories)
        return logits, module


def _on_host(indices: Tensor, values: Tensor) -> tuple[IntArray, FloatArray]:
    """Returns both as arrays, by one copy, since each copy waits for the device."""
    both = to_host(torch.stack([indices.double(), values.double()]))
    return both[0].astype(np.int64), both[1]
