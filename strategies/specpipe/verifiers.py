"""SpecPipe's lossy verifiers (arXiv 2504.04104 v2, 3.4): faster, not distributed as the target.

Both use ``Answers.probs``: the processed target distribution or, for greedy requests, the model's
distribution at temperature 1 (a one-hot distribution would turn either rule into ``match``).
"""

from __future__ import annotations

import numpy as np

from specdec.parts.fields import PositiveShare, validated
from specdec.state import DecodeState
from specdec.types import (
    NO_NODE,
    IntArray,
    Lossless,
    Needs,
    Output,
    Verdict,
)
from specdec.verifiers.answers import RootAnswered, accept_child, follow, record_answers


class RelaxedVerifier:
    """Accepts the most probable child (SpecPipe 3.4 (1), verification without pipeline stalls).

    Of a node's children the one with the highest target probability is accepted, so every answer is
    a hit while there are children; ties go to the higher draft probability. Without children, the
    next token is the target's own.
    """

    needs = Needs(target_probs=True)
    lossless = Lossless.LOSSY

    def verify(self, state: DecodeState, output: Output) -> list[Verdict]:
        """One verdict per request whose root was answered."""
        return [follow(a, accept_child(a, self._choose)) for a in record_answers(state, output)]

    @staticmethod
    def _choose(answered: RootAnswered, slot: int, children: IntArray) -> int:
        tree = answered.request.tree
        target_probs = answered.probs(slot)[tree.tokens[children]]
        return int(children[np.lexsort((-tree.logprobs[children], -target_probs))[0]])


class StrictVerifier:
    """Accepts children within the target's nucleus (SpecPipe 3.4 (2)).

    A child is acceptable if its token is in the smallest set of most probable target tokens with
    total probability ``top_p``; of the acceptable children the one with the highest draft
    probability is accepted. Without one, the next token is the target's own.
    """

    needs = Needs(target_probs=True)
    lossless = Lossless.LOSSY

    @validated
    def __init__(self, *, top_p: PositiveShare = 0.9) -> None:
        """Sets the nucleus.

        Args:
            top_p: its probability, above 0 and at most 1. Default: 0.9; SpecPipe states no value.
        """
        self.top_p = top_p

    def verify(self, state: DecodeState, output: Output) -> list[Verdict]:
        """One verdict per request whose root was answered."""
        return [follow(a, accept_child(a, self._choose)) for a in record_answers(state, output)]

    def _choose(self, answered: RootAnswered, slot: int, children: IntArray) -> int:
        tree, target_probs = answered.request.tree, answered.probs(slot)
        order = np.argsort(-tree.logprobs[children], kind="stable")
        for child in children[order].tolist():
            prob = target_probs[tree.tokens[child]]
            if prob > 0.0 and target_probs[target_probs > prob].sum() < self.top_p:
                return int(child)
        return NO_NODE
