"""SpecPipe (arXiv 2504.04104 v2): a pipeline that receives one level of a dynamic tree per step.

A draft model on its own rank (3.3.1) proposes a tree of fixed width (3.3.3). Each step computes,
prunes and transmits (3.3.2 and Algorithm 1, reconstructed). Deviations are in docs/specpipe.md.
The preset ``pipedec`` follows the first version of the paper.

The verifiers are lossy (3.4): the output's distribution is not the target's. For greedy
requests ``TokenTree.target_probs`` are those at temperature 1: a one-hot distribution would turn
either rule into ``match``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.interfaces import Verifier
from specdec.parts.fields import PositiveShare, validated
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import NO_NODE, IntArray, Lossless, Needs, Verdict
from specdec.verifiers.walk import follow_children, target_probs


class RelaxedVerifier(Verifier):
    """Accepts the child with the highest target probability (SpecPipe 3.4 (1)).

    Every answer is therefore a hit as long as there are children; ties go to the higher draft
    probability. Without children, the next token is the target's own.
    """

    needs = Needs(target_probs=True)
    lossless = Lossless.LOSSY

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        return [follow_children(request, self._choose) for request in requests]

    @staticmethod
    def _choose(tree: TokenTree, slot: int, children: IntArray) -> int:
        probs = target_probs(tree, slot)[tree.tokens[children]]
        return int(children[np.lexsort((-tree.logprobs[children], -probs))[0]])


@validated
@dataclass(eq=False, kw_only=True)
class StrictVerifier(Verifier):
    """Accepts children within the target's nucleus (SpecPipe 3.4 (2)).

    A child is acceptable if its token is in the smallest set of most probable target tokens with
    total probability ``top_p``. The acceptable child with the highest draft probability is
    accepted. Without one, the next token is the target's own.

    Args:
        top_p: probability of the nucleus, above 0 and at most 1; SpecPipe states no value.
    """

    needs = Needs(target_probs=True)
    lossless = Lossless.LOSSY

    top_p: PositiveShare = 0.9

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        return [follow_children(request, self._choose) for request in requests]

    def _choose(self, tree: TokenTree, slot: int, children: IntArray) -> int:
        probs = target_probs(tree, slot)
        order = np.argsort(-tree.logprobs[children], kind="stable")
        for child in children[order].tolist():
            prob = probs[tree.tokens[child]]
            if prob > 0.0 and probs[probs > prob].sum() < self.top_p:
                return int(child)
        return NO_NODE
