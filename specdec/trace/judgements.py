"""What the draft and the target thought of each other's tokens, at every decided token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from specdec.device import Probs, on_host
from specdec.types import FloatArray, IntArray

_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What is known of an answered node.

    Attributes:
        tokens, logprobs: [K], the draft's candidates; those in the tree have logprob -inf.
        target: float64[V], the target's distribution; None where the run does not need it.
    """

    tokens: IntArray
    logprobs: FloatArray
    target: Probs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A decided token, seen by draft and target.

    Attributes:
        rank: of the token among the node's candidates by draft probability, 1 the most probable; 0
            if it is not among them.
        candidates: number of the node's candidates; 0 if the draft had not proposed any.
        in_tree: whether the token was a child of the node in the tree.
        draft_prob: the draft's probability of the token; None if it is not among the candidates.
        top_prob: the draft's probability of its most probable candidate; None without candidates.
        top_target_prob, top_target_rank: the target's probability and rank (1 the most probable) of
            that candidate; None where the run does not know the target's distribution.
    """

    rank: int
    candidates: int
    in_tree: bool
    draft_prob: float | None = None
    top_prob: float | None = None
    top_target_prob: float | None = None
    top_target_rank: int | None = None

    def row(self) -> list[Any]:
        """The values in the order of the attributes."""
        return list(astuple(self))


def judgement(proposal: Proposal | None, children: Mapping[int, float], token: int) -> Judgement:
    """The judgement of a decided token.

    Args:
        proposal: of the node that the token follows; None if its answer was not recorded.
        children: token -> log draft probability of the node's children in the tree.
        token: the token that was decided.
    """
    logprobs = dict(children)
    if proposal is not None:
        for other, value in zip(proposal.tokens.tolist(), proposal.logprobs.tolist(), strict=True):
            if value > -np.inf:
                logprobs.setdefault(other, value)
    if not logprobs:
        return Judgement(rank=0, candidates=0, in_tree=False)
    own, top = logprobs.get(token), max(logprobs, key=lambda other: logprobs[other])
    target_prob = target_rank = None
    if proposal is not None and proposal.target is not None:
        target = on_host(proposal.target)
        target_prob = round(float(target[top]), _DIGITS)
        target_rank = 1 + int(np.count_nonzero(target > target[top]))
    return Judgement(
        rank=0 if own is None else 1 + sum(value > own for value in logprobs.values()),
        candidates=len(logprobs),
        in_tree=token in children,
        draft_prob=None if own is None else round(float(np.exp(own)), _DIGITS),
        top_prob=round(float(np.exp(logprobs[top])), _DIGITS),
        top_target_prob=target_prob,
        top_target_rank=target_rank,
    )
