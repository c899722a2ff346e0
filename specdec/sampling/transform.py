"""The sampling transform: from logits to the distribution that is sampled, the same for all models.

Order and meaning are those of transformers' ``generate``: no_repeat_ngram, other processors,
temperature, top-k, top-p. Probabilities are float64 from the temperature on.

Shape letters: A rows (answered nodes), W rows (expanded nodes), V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from specdec.device import Probs, to_host
from specdec.sampling import on_device
from specdec.sampling.captured import StaticDraws
from specdec.sampling.history import LogitsProcessor, apply_processors, repeated_ngrams
from specdec.sampling.host import (
    CHUNK,
    Distribution,
    argmax,
    at_least_kth,
    check_finite,
    filter_top_k,
    filter_top_p,
    row_max,
    sample_candidates,
    stacked,
    weights,
)
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.on_device import Weighted, on_accelerator, weigh
from specdec.types import Answers, FloatArray, IntArray

__all__ = ["SamplingParams", "SamplingTransform", "TargetSampler", "sample_candidates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the target's logits.

    Attributes:
        temperature: 0 is greedy (the lowest token id wins a tie); then top_k and top_p do nothing.
        top_k: keep the k most probable tokens, all those tied with the k-th included; 0 is off.
        top_p: keep the smallest set of most probable tokens with at least this mass; 1 is off.
        no_repeat_ngram: no n-gram of this size occurs twice in prompt and output; 0 is off.
        processors: Hugging Face logits processors, applied before the temperature.

    Raises:
        ValueError: for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    no_repeat_ngram: int = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} is not allowed: give 0 for greedy decoding or a"
                " positive number such as 0.8"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(
                f"top_p={self.top_p} is not allowed: give a number above 0 and at most 1"
                " (1 turns it off)"
            )
        for key, value in (("top_k", self.top_k), ("no_repeat_ngram", self.no_repeat_ngram)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"{key}={value} is not allowed: give a whole number of at least 0 (0 turns it"
                    " off)"
                )
        if not isinstance(self.processors, tuple) or not all(map(callable, self.processors)):
            raise ValueError(
                f"processors={self.processors!r} is not allowed: give a tuple of Hugging Face"
                " logits processors, e.g. (RepetitionPenaltyLogitsProcessor(1.1),)"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of a draw."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the transform looks at the tokens before the one that is chosen."""
        return bool(self.no_repeat_ngram or self.processors)


class SamplingTransform:
    """Applies ``SamplingParams`` to logits.

    In every method logits are [A, V] tensors of any float type and device, and ``histories[i]`` is
    the int64 sequence up to and including the node that row i answers; None is allowed where
    ``params.needs_history`` is false. Results do not depend on which rows share a call. Logits on
    an accelerator stay there, and so do the distributions made of them.
    """

    def __init__(self, params: SamplingParams, *, static: StaticDraws | None = None) -> None:
        """Takes what is applied; ``static``: draws over static buffers, where they are wanted."""
        self.params = params
        self._static = static

    def probs(self, logits: torch.Tensor, histories: Sequence[IntArray] | None = None) -> Probs:
        """float64[A, V]: the distribution that is sampled; one-hot at the argmax if greedy."""
        return self.distribution(logits, histories).probs()

    def sample(
        self,
        logits: torch.Tensor,
        uniforms: FloatArray,
        histories: Sequence[IntArray] | None = None,
    ) -> IntArray:
        """int64[A]: the token at ``uniforms``[A] of each row's CDF; the argmax if greedy."""
        params = self.params
        if not len(logits):
            return np.zeros(0, np.int64)
        captured = not params.greedy and self._static is not None and self._static.serves(logits)
        if captured or on_accelerator(logits):
            return self._sample_there(self._processed(logits, histories), uniforms, captured)
        if params.greedy:
            return argmax(self._processed(logits, histories))
        if 0 < params.top_k < logits.shape[1]:
            return self.distribution(logits, histories).sample(uniforms)
        logits = self._processed(logits, histories)
        chunks = _chunks(logits, params.temperature, params.top_p)
        tokens = [chunk.sample(uniforms[rows]) for rows, chunk in chunks]
        return tokens[0] if len(tokens) == 1 else np.concatenate(tokens)

    def distribution(
        self, logits: torch.Tensor, histories: Sequence[IntArray] | None = None
    ) -> Distribution | Weighted:
        """The processed distribution on its support, to be sampled and written out at one cost."""
        params, vocab_size = self.params, logits.shape[1]
        if not len(logits):
            return Distribution(None, np.zeros((0, vocab_size)), vocab_size)
        logits = self._processed(logits, histories)
        if on_accelerator(logits):
            return self._weighed(logits)
        if params.greedy:
            best = argmax(logits)
            return Distribution(best[:, None], np.ones((len(best), 1)), vocab_size)
        if 0 < params.top_k < vocab_size:
            return filter_top_k(logits, params.temperature, params.top_k, params.top_p)
        return stacked([part for _, part in _chunks(logits, params.temperature, params.top_p)])

    def proposal_probs(
        self, logits: torch.Tensor, histories: Sequence[IntArray] | None = None
    ) -> Probs:
        """float64[W, V]: the distribution a draft samples candidates from, for rejection.

        The processed distribution; at temperature 1 and unfiltered if greedy, where the processed
        one has a single token and could not propose siblings. Any distribution is lossless, as long
        as it is the one that was sampled from.
        """
        if not self.params.greedy or not len(logits):
            return self.probs(logits, histories)
        logits = self._processed(logits, histories)
        if on_accelerator(logits):
            return weigh(logits, temperature=1.0).probs()
        return stacked([part for _, part in _chunks(logits, 1.0, 1.0)]).probs()

    def top(
        self, logits: torch.Tensor, k: int, histories: Sequence[IntArray] | None = None
    ) -> tuple[IntArray, FloatArray]:
        """The best draft candidates of each row.

        Processors and temperature (1 if greedy) are applied, so that scores estimate the chance
        that the target draws the token; top-k and top-p are not.

        Args:
            logits: [W, V].
            k: candidates per row; at most V are returned.
            histories: as in the class.

        Returns:
            tokens int64[W, K], best first, ties in token-id order; log probabilities float64[W, K],
            <= 0, and -inf for tokens that a processor bans: those are no candidates.
        """
        k = min(k, logits.shape[1])
        if not len(logits):
            return np.zeros((0, k), np.int64), np.zeros((0, k))
        logits = self._processed(logits, histories)
        if self.params.temperature not in (0.0, 1.0):
            logits = logits / self.params.temperature
        # The budget beside a pass of a small draft is some 100 us: two calls here, not twenty.
        scores = torch.log_softmax(logits, dim=1)
        best = scores.topk(min(k + 1, logits.shape[1]), dim=1)
        tokens, logprobs = _on_host(best.indices, best.values)
        check_finite(logprobs[:, 0])
        tied = (logprobs[:, 1:] == logprobs[:, :-1]).any()  # topk leaves their order open
        if tied and on_accelerator(scores):
            tokens, logprobs = _on_host(*on_device.top(scores, k))
        elif tied:
            tokens, kept, _ = at_least_kth(scores, k)
            order = np.argsort(-kept, axis=1, kind="stable")
            tokens = np.take_along_axis(tokens, order, axis=1)
            logprobs = np.take_along_axis(kept, order, axis=1).astype(np.float64)
        return tokens[:, :k], np.minimum(logprobs[:, :k], 0.0)

    def _sample_there(self, logits: torch.Tensor, uniforms: FloatArray, captured: bool) -> IntArray:
        params = self.params
        if params.greedy:
            return on_device.argmax(logits)
        static = self._static if captured else None
        sample = on_device.sample if static is None else static.sample
        return sample(
            logits,
            uniforms,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )

    def _weighed(self, logits: torch.Tensor) -> Weighted:
        params = self.params
        if params.greedy:
            return on_device.one_hot(logits)
        return weigh(logits, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)

    def _processed(
        self, logits: torch.Tensor, histories: Sequence[IntArray] | None
    ) -> torch.Tensor:
        """[A, V] in float32 or float64, processors applied; never the caller's tensor changed."""
        logits = logits.detach()
        if not on_accelerator(logits):
            logits = logits.cpu()
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        params = self.params
        if not params.needs_history:
            return logits
        assert histories is not None, "these sampling parameters need histories"
        if params.no_repeat_ngram:
            rows, tokens = repeated_ngrams(histories, params.no_repeat_ngram)
            inside = tokens < logits.shape[1]
            logits = logits.clone()
            logits[rows[inside], tokens[inside]] = -torch.inf
        if params.processors:
            logits = apply_processors(params.processors, logits, histories)
        return logits


def _on_host(indices: torch.Tensor, values: torch.Tensor) -> tuple[IntArray, FloatArray]:
    """int64 and float64 arrays; from a device in one copy, since each waits for the device."""
    if not on_accelerator(values):
        return indices.numpy(), values.numpy().astype(np.float64)
    both = to_host(torch.stack([indices.double(), values.double()]))
    return both[0].astype(np.int64), both[1]


def _chunks(
    logits: torch.Tensor, temperature: float, top_p: float
) -> Iterator[tuple[slice, Distribution]]:
    """Temperature and top-p over whole rows, in chunks of rows that fit the cache."""
    values = logits.numpy()
    num_rows, vocab_size = values.shape
    step = max(1, CHUNK // vocab_size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        if top_p < 1.0:
            yield rows, filter_top_p(values[rows], temperature, top_p)
        else:
            mass = weights(values[rows], row_max(values[rows]), temperature)
            yield rows, Distribution(None, mass, vocab_size)


class _AnswerableRequest(Protocol):
    """What the answering rank knows of a request (``RequestState`` has it)."""

    @property
    def id(self) -> int: ...

    @property
    def sampling(self) -> SamplingParams: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """Nodes of one request that are to be answered.

    Attributes:
        request: id and sampling parameters.
        node_ids: int64[A].
        positions: int64[A], absolute positions of the nodes (their next tokens are at + 1).
        histories: A sequences up to and including the node, where the parameters need them.
    """

    request: _AnswerableRequest
    node_ids: IntArray
    positions: IntArray
    histories: Sequence[IntArray] | None = None


class TargetSampler:
    """Turns the target's logits into answers, on the rank that has them."""

    def __init__(
        self, *, draws: KeyedDraws, needs_probs: bool, static: StaticDraws | None = None
    ) -> None:
        """Takes what all requests share.

        Args:
            draws: the run's keyed draws.
            needs_probs: whether answers carry the processed distributions (``Needs.target_probs``).
            static: draws over static buffers, where they are asked for.
        """
        self._draws = draws
        self._static = static
        self._needs_probs = needs_probs
        self._transforms: dict[SamplingParams, SamplingTransform] = {}

    def answer(self, asked: Sequence[Asked], logits: torch.Tensor) -> tuple[Answers, ...]:
        """The target's own next token after each node, by its keyed draw.

        Where probabilities are needed they are the processed distribution; for a greedy request
        the model's own at temperature 1, which lossy verifiers compare tokens by (the one-hot
        distribution that greedy decoding follows is in the tokens already). Requests that share
        their parameters share a call, and from a device a copy.

        Args:
            asked: one per request.
            logits: [sum of A, V], in their order.
        """
        if len({each.request.sampling for each in asked}) > 1:
            sizes = [len(each.node_ids) for each in asked]
            parts = zip(asked, logits.split(sizes), strict=True)
            return tuple(answer for each, rows in parts for answer in self.answer([each], rows))
        tokens, probs = self._sampled(asked, logits)
        answers, start = [], 0
        for each in asked:
            rows = slice(start, start + len(each.node_ids))
            answers.append(
                Answers(
                    request=each.request.id,
                    node_ids=each.node_ids,
                    tokens=tokens[rows],
                    probs=None if probs is None else probs[rows],
                )
            )
            start = rows.stop
        return tuple(answers)

    def _sampled(
        self, asked: Sequence[Asked], logits: torch.Tensor
    ) -> tuple[IntArray, Probs | None]:
        """Tokens and, where needed, distributions of requests with the same parameters."""
        params = asked[0].request.sampling
        transform = self._transforms.get(params)
        if transform is None:
            transform = SamplingTransform(params, static=self._static)
            self._transforms[params] = transform
        uniforms, histories = np.zeros(len(logits)), None
        if not params.greedy:
            uniforms = np.concatenate(
                [self._draws.uniform(a.request.id, a.positions + 1, Purpose.TARGET) for a in asked]
            )
        if params.needs_history:
            histories = [history for each in asked for history in each.histories or ()]
        if not self._needs_probs:
            return transform.sample(logits, uniforms, histories), None
        if params.greedy:
            tokens = transform.sample(logits, uniforms, histories)
            return tokens, transform.proposal_probs(logits, histories)
        distribution = transform.distribution(logits, histories)
        return distribution.sample(uniforms), distribution.probs()
