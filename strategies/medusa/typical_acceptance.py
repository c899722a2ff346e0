"""Shape letters: N tree nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from specdec.device import rows_on_host
from specdec.interfaces import Verifier
from specdec.parts.fields import PositiveShare, validated
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import NO_NODE, BoolArray, FloatArray, IntArray, Lossless, Needs, Verdict
from specdec.verifiers.walk import accept_child, follow


class TypicalVerifier(Verifier):
    """Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1); lossy.

    A child is acceptable if target_probs(token) > min(epsilon, delta * exp(-entropy)). The longest
    path of acceptable nodes is accepted; among equally long ones, at each node the child with the
    higher target probability. The target's own token follows. For greedy requests the distribution
    is that at temperature 1: a one-hot one would turn the rule into ``match``.

    Args:
        epsilon: absolute threshold, above 0 and at most 1.
        delta: threshold relative to exp(-entropy), above 0; Medusa uses sqrt(epsilon).
    """

    needs = Needs(target_probs=True)
    lossless = Lossless.LOSSY

    @validated
    def __init__(
        self,
        *,
        epsilon: PositiveShare = 0.09,
        delta: Annotated[float, Field(gt=0)] = 0.3,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        return [self._follow(request) for request in requests]

    def _follow(self, request: RequestState) -> Verdict:
        tree = request.tree
        probs = self._acceptable(tree)
        heights = _heights(tree.parents, tree.depths, probs > 0.0)

        def choose(_slot: int, children: IntArray) -> int:
            best = np.lexsort((-probs[children], -heights[children]))
            best = best[probs[children[best]] > 0.0]
            return int(children[best[0]]) if len(best) else NO_NODE

        return follow(request, accept_child(tree, choose))

    def _acceptable(self, tree: TokenTree) -> FloatArray:
        """Returns float64[N]: target probability of the acceptable nodes, 0 elsewhere."""
        slots = np.flatnonzero(tree.answered)
        rows = np.full(len(tree), -1)
        rows[slots] = np.arange(len(slots))
        probs = rows_on_host([tree.target_probs[i] for i in tree.ids[slots].tolist()])
        logs = np.log(probs, out=np.zeros_like(probs), where=probs > 0.0)
        entropy = -(probs * logs).sum(axis=1)
        threshold = np.minimum(self.epsilon, self.delta * np.exp(-entropy))
        above = np.where(tree.parents == NO_NODE, -1, rows[tree.parents])
        node_probs = np.where(above >= 0, probs[above, tree.tokens], 0.0)
        return np.where(node_probs > threshold[above], node_probs, 0.0)


def _heights(parents: IntArray, depths: IntArray, acceptable: BoolArray) -> IntArray:
    """Returns int64[N]: length of the longest path of acceptable nodes below each node."""
    heights = np.zeros(len(parents), np.int64)
    for depth in range(int(depths.max()), 0, -1):
        level = np.flatnonzero(acceptable & (depths == depth))
        np.maximum.at(heights, parents[level], heights[level] + 1)
    return heights
