"""Draft candidates from logits: the most probable tokens, or tokens sampled by keyed draws.

Shape letters: W nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.device import Probs, SupportProbs, on_host
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import SamplingTransform, sample_candidates
from specdec.types import Candidates, FloatArray, IntArray


def drawn(probs: Probs, k: int, uniforms: FloatArray) -> Candidates:
    """Samples candidates from ``probs`` [W, V] by ``uniforms``, float64[W, K]."""
    if not isinstance(probs, SupportProbs):
        tokens, logprobs, counts = sample_candidates(on_host(probs), k, uniforms)
    else:
        entries, logprobs, counts = sample_candidates(probs.values, k, uniforms)
        tokens = np.take_along_axis(probs.ids, entries, axis=1)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts, probs=probs)


def sibling_draws(draws: KeyedDraws, request_id: int, positions: IntArray, k: int) -> FloatArray:
    """Returns float64[W, K]: one draw for each of K siblings below nodes at ``positions``[W]."""
    return draws.uniform(request_id, positions[:, None] + 1, Purpose.DRAFT, np.arange(k))


def top_candidates(
    transform: SamplingTransform, logits: Tensor, k: int, histories: Sequence[IntArray] | None
) -> Candidates:
    tokens, logprobs = transform.top(logits, k, histories)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts_of(transform, logprobs))


def counts_of(transform: SamplingTransform, logprobs: FloatArray) -> IntArray:
    """Returns int64[W]: how many candidates in each row of ``logprobs``[W, K] are not banned."""
    if transform.params.needs_history:
        return np.asarray((logprobs > -np.inf).sum(axis=1), np.int64)
    return np.full(len(logprobs), logprobs.shape[1])


def candidates_of(
    transform: SamplingTransform,
    logits: Tensor,
    k: int,
    histories: Sequence[IntArray] | None,
    *,
    draws: KeyedDraws | None,
    request_id: int,
    positions: IntArray,
) -> Candidates:
    """Returns candidates for W nodes of one request at ``positions``, int64[W].

    With ``draws`` they are sampled, and returned with their distribution. Otherwise they are the
    most probable tokens.
    """
    if draws is None:
        return top_candidates(transform, logits, k, histories)
    probs, k = transform.proposal_probs(logits, histories), min(k, logits.shape[1])
    return drawn(probs, k, sibling_draws(draws, request_id, positions, k))
