"""Candidates from a draft's logits: the most probable ones, or sampled ones by keyed draws.

Shape letters: W nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.device import DeviceProbs, Probs, select_rows
from specdec.sampling import on_device
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import SamplingTransform, sample_candidates
from specdec.types import Candidates, FloatArray, IntArray

if TYPE_CHECKING:
    pass


def drawn(probs: Probs, k: int, uniforms: FloatArray) -> Candidates:
    """Candidates by ``uniforms``, float64[W, K], where the distributions lie."""
    if isinstance(probs, DeviceProbs):
        tokens, logprobs, counts = on_device.sample_candidates(probs, k, uniforms)
    else:
        tokens, logprobs, counts = sample_candidates(probs, k, uniforms)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts, probs=probs)


def sibling_draws(draws: KeyedDraws, request_id: int, positions: IntArray, k: int) -> FloatArray:
    """float64[W, K]: the draw of each sibling of nodes at ``positions``[W]."""
    return draws.uniform(request_id, positions[:, None] + 1, Purpose.DRAFT, np.arange(k))


def top_candidates(
    transform: SamplingTransform,
    logits: torch.Tensor,
    k: int,
    histories: Sequence[IntArray] | None,
) -> Candidates:
    """The ``k`` most probable candidates of each row of logits[W, V]."""
    tokens, logprobs = transform.top(logits, k, histories)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts_of(transform, logprobs))


def counts_of(transform: SamplingTransform, logprobs: FloatArray) -> IntArray:
    """int64[W]: candidates per row of ``logprobs``[W, K]; processors may ban tokens."""
    if transform.params.needs_history:
        return np.asarray((logprobs > -np.inf).sum(axis=1), np.int64)
    return np.full(len(logprobs), logprobs.shape[1])


def candidates_of(
    transform: SamplingTransform,
    logits: torch.Tensor,
    k: int,
    histories: Sequence[IntArray] | None,
    *,
    draws: KeyedDraws | None,
    request_id: int,
    positions: IntArray,
) -> Candidates:
    """Candidates for nodes of one request, without a look at its tree.

    Args:
        transform: the request's own.
        logits: [W, V].
        k: candidates per node at most.
        histories: for ``transform``.
        draws: candidates are sampled by them (see ``sampled_candidates``) and come with their
            distribution; None takes the most probable ones.
        request_id: keys the draws.
        positions: int64[W], of the nodes.
    """
    if draws is None:
        return top_candidates(transform, logits, k, histories)
    probs = transform.proposal_probs(logits, histories)
    k = min(k, probs.shape[1])
    uniforms = sibling_draws(draws, request_id, positions, k)
    return drawn(probs, k, uniforms)


def picked(candidates: Candidates, rows: IntArray) -> Candidates:
    """The rows that ``rows``, int64[W], names, each as often as it is named."""
    assert candidates.origins is None, "origins would be lost"
    return Candidates(
        tokens=candidates.tokens[rows],
        logprobs=candidates.logprobs[rows],
        counts=candidates.counts[rows],
        probs=None if candidates.probs is None else select_rows(candidates.probs, rows),
    )
