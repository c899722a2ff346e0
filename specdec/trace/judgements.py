"""Compares the probabilities that draft and target gave to each decided token.

Shape letters: K candidates, V vocabulary.
"""

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
    """The probabilities that draft and target gave to the children of an answered node.

    Attributes:
        tokens, logprobs: [K], the draft's candidates; those in the tree have logprob -inf.
        target: float64[V], the target's distribution; None if the run does not compute it.
    """

    tokens: IntArray
    logprobs: FloatArray
    target: Probs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How the draft and the target rated the token that was decided after a node.

    Ranks are by probability, 1 the most probable. The *top* candidate is the draft's most probable
    one. Values are None without candidates; the target's also if its distribution is unknown.
    """

    rank: int  # of the token among the draft's candidates; 0 if it is not one
    candidates: int  # number of the draft's candidates; 0 if it had proposed none
    in_tree: bool  # whether the token was a child of the node
    draft_prob: float | None = None  # of the token; None if it is not a candidate
    top_prob: float | None = None  # draft probability of the top candidate
    top_target_prob: float | None = None  # target probability of the top candidate
    top_target_rank: int | None = None  # the target's rank of the top candidate

    def row(self) -> list[Any]:
        return list(astuple(self))


def judgement(proposal: Proposal | None, children: Mapping[int, float], token: int) -> Judgement:
    """Rates a decided token.

    Args:
        proposal: of the node that the token follows; None if its answer was not recorded.
        children: token -> log draft probability of the node's children in the tree.
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
