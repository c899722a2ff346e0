"""SSD, Saguaro (arXiv 2603.03251): the draft prepares for the outcomes of the pending verification.

While the target verifies a chain of gamma tokens, the draft enumerates outcomes: the accepted
length k and the token after it, for which it takes the F_k most probable ones besides the drafted
token. It drafts gamma tokens below each outcome, all outcomes in one batch. If the verification
ends in one of them (*hit*), the next chain is already drafted; otherwise (*miss*) it is drafted
just in time. The outcomes are unsubmitted nodes of the tree. Under ``rejection`` they are further
samples of a node, which are tested in turn, so the target's distribution stays exact.
"""

from collections import defaultdict
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from specdec.clocks import LatencyProfile
from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import DraftCount, NotNegative, expects, validated
from specdec.policies.chain import first_path, grow_chains
from specdec.policies.tree_growth import (
    append_best,
    as_nodes,
    draft_passes,
    expand,
    last_position,
    live_requests,
    ready_requests,
    take_first,
)
from specdec.state import DecodeState, RequestState
from specdec.types import IntArray, Nodes

AUTO = "auto"
_UNPRICED, _MOST = 4, 8  # draft tokens of "auto": without a profile, and at most
_OPEN_SHARE = expects("it must be a number above 0 and below 1")
OpenShare = Annotated[float, Field(gt=0, lt=1), _OPEN_SHARE]


def fan_outs(*, gamma: int, outcomes: int, acceptance: float, power: float) -> list[int]:
    """Returns the number of outcomes F_k for each accepted length k = 0 .. gamma.

    They sum to ``outcomes``. The target accepts k < gamma tokens with probability P(k) = a^k (1 -
    a) and gamma tokens with a^gamma, where a is ``acceptance``. If the target's token is not among
    F candidates with a probability proportional to F^-r (r is ``power``), the probability of a hit
    is largest for F_k proportional to P(k)^(1 / (1 + r)): a geometric series in k, whose last term
    is larger. Shares are rounded to whole numbers by largest remainder, ties to the shorter length.
    """
    ends = [acceptance**k * (1.0 - acceptance) for k in range(gamma)] + [acceptance**gamma]
    weights = np.array(ends) ** (1.0 / (1.0 + power))
    shares = outcomes * weights / weights.sum()
    counts = np.floor(shares).astype(int)
    largest = np.argsort(counts - shares, kind="stable")
    counts[largest[: outcomes - counts.sum()]] += 1
    return [int(count) for count in counts]


class Ssd(TreePolicy):
    """Submits a chain of ``gamma`` tokens, and drafts a chain below each likely outcome of it.

    A round has gamma + 1 draft passes during the target's pass: one for the candidates after the
    chain's end, and one per token of the outcomes' chains, with a row for each outcome. On an
    executor of N steps per answer, each step runs its share of these passes.

    Args:
        gamma: draft tokens per target pass. "auto" is the largest number up to 8 for which gamma +
            1 draft passes fit into a target pass by the latency profile; 4 without a profile.
        outcomes: number of outcomes to prepare for, which are the rows of a draft pass.
        acceptance, power: shape of the fan-out, see ``fan_outs``.
        spend: "shares" takes the F_k best candidates after each accepted length k, as published.
            "scores" takes the best over all lengths by the draft's probability of the outcome; this
            selects by value, so rejection verifiers cannot be used.
        latency: steps of the executor from submission to answer.
    """

    @validated
    def __init__(
        self,
        *,
        gamma: DraftCount | Literal["auto"],
        outcomes: DraftCount,
        acceptance: OpenShare = 0.8,
        power: NotNegative = 1.0,
        spend: Literal["shares", "scores"] = "shares",
        latency: int | None = 1,
        profile: LatencyProfile | None = None,
    ) -> None:
        if gamma == AUTO:
            passes = draft_passes(profile, stages=latency or 1, rows=outcomes)
            gamma = _UNPRICED if passes is None else min(max(1, int(passes + 1e-9) - 1), _MOST)
        self.gamma = self.chain_length = int(gamma)
        self.fan_outs = fan_outs(
            gamma=self.gamma, outcomes=outcomes, acceptance=acceptance, power=power
        )
        self.value_dependent = spend == "scores"
        self._outcomes = outcomes
        self._children = 1 + (outcomes if self.value_dependent else max(self.fan_outs))
        self._per_step = -(-(self.gamma + 1) // (latency or 1))
        self._passes = defaultdict[int, int](int)  # request -> draft passes of its round so far

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.gamma

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=True)
        lengths = [(request, self.gamma) for request in requests]
        grow_chains(state, source, lengths, self._children)
        self._passes.update((request.id, 0) for request in requests)
        return as_nodes((r, np.array(first_path(r.tree))) for r in requests)

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        for _ in range(self._per_step):
            growing = [
                (request, self._leaves(request))
                for request in live_requests(state)
                if request.awaiting and self._passes[request.id] <= self.gamma
            ]
            expand(state, source, growing, self._children)
            for request, leaves in growing:
                if self._passes[request.id] == 0:
                    self._enumerate(request)
                else:
                    take_first(request.tree, leaves, 1)
                self._passes[request.id] += 1
        return False

    def close(self, request_id: int) -> None:
        self._passes.pop(request_id, None)

    def _leaves(self, request: RequestState) -> IntArray:
        """Returns slots to expand: the chain's end in a round's first pass, then outcomes' ends."""
        tree = request.tree
        is_leaf = ~tree.expanded & (tree.positions < last_position(request))
        first = self._passes[request.id] == 0
        return np.flatnonzero(is_leaf & ((tree.submitted_at >= 0) == first))

    def _enumerate(self, request: RequestState) -> None:
        """Turns the outcomes into nodes: children of the chain's nodes that are not in it."""
        tree, limit = request.tree, last_position(request)
        chain = [slot for slot in first_path(tree) if int(tree.positions[slot]) < limit]
        if self.value_dependent:
            append_best(tree, np.array(chain, np.int64), self._outcomes, self._children)
            return
        for slot, num in zip(chain, self.fan_outs, strict=False):
            take_first(tree, np.array([slot]), num)
