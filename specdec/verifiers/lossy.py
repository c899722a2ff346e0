"""Lossy rules: faster, and the output is not the target's. Labelled lossy wherever printed.

All look at ``Answers.probs``: the processed target distribution, or, for greedy requests, the
model's distribution at temperature 1 (a one-hot one would turn every rule into ``match``).

Shape letters: C children, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
from pydantic import Field

from specdec.device import on_host
from specdec.parts.fields import PositiveShare, validated
from specdec.state import DecodeState
from specdec.types import (
    NO_NODE,
    BoolArray,
    FloatArray,
    IntArray,
    Lossless,
    Needs,
    Output,
    Verdict,
)
from specdec.verifiers.answers import Choice, RootAnswered, follow, record_answers


class RelaxedVerifier:
    """SpecPipe 3.4 (1), verification without pipeline stalls.

    Of a node's children the one with the highest target probability is taken, so that every answer
    is a hit while there are children; ties go to the higher draft probability. Without children the
    target's own token follows.
    """

    needs = Needs(target_probs=True)
    lossless = Lossless.LOSSY

    def verify(self, state: DecodeState, output: Output) -> list[Verdict]:
        """One verdict per request whose root was answered."""
        return [follow(a, _rule(a, self._choose)) for a in record_answers(state, output)]

    @staticmethod
    def _choose(answered: RootAnswered, slot: int, children: IntArray) -> int:
        tree = answered.request.tree
        chances = answered.probs(slot)[tree.tokens[children]]
        return int(children[np.lexsort((-tree.logprobs[children], -chances))[0]])


class StrictVerifier:
    """SpecPipe 3.4 (2), acceptance within the target's nucleus.

    A child is acceptable if its token lies in the smallest set of most probable target tokens with
    mass ``top_p``; of those the one with the highest draft probability is taken. Without one the
    target's own token follows.
    """

    needs = Needs(target_probs=True)
    lossless = Lossless.LOSSY

    @validated
    def __init__(self, *, top_p: PositiveShare = 0.9) -> None:
        """Sets the nucleus.

        Args:
            top_p: its mass, above 0 and at most 1; SpecPipe states no value.

        Raises:
            ValueError: for a mass out of range.
        """
        self.top_p = top_p

    def verify(self, state: DecodeState, output: Output) -> list[Verdict]:
        """One verdict per request whose root was answered."""
        return [follow(a, _rule(a, self._choose)) for a in record_answers(state, output)]

    def _choose(self, answered: RootAnswered, slot: int, children: IntArray) -> int:
        tree, probs = answered.request.tree, answered.probs(slot)
        order = np.argsort(-tree.logprobs[children], kind="stable")
        for child in children[order].tolist():
            chance = probs[tree.tokens[child]]
            if chance > 0.0 and probs[probs > chance].sum() < self.top_p:
                return int(child)
        return NO_NODE


class TypicalVerifier:
    """Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1).

    A child is acceptable if target_probs(token) > min(epsilon, delta * exp(-entropy)). Of the paths
    of acceptable nodes the longest is taken; among equally long ones, at each node the child of
    higher target probability. The target's own token follows.
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
        """Sets the threshold.

        Args:
            epsilon: hard threshold on the probability, above 0 and at most 1.
            delta: threshold relative to exp(-entropy), above 0; Medusa sets it to sqrt(epsilon).

        Raises:
            ValueError: for a threshold out of range.
        """
        self.epsilon = epsilon
        self.delta = delta

    def verify(self, state: DecodeState, output: Output) -> list[Verdict]:
        """One verdict per request whose root was answered."""
        return [self._follow(answered) for answered in record_answers(state, output)]

    def _follow(self, answered: RootAnswered) -> Verdict:
        chances = self._acceptable(answered)
        tree = answered.request.tree
        heights = _heights(tree.parents, tree.depths, chances > 0.0)

        def choose(_answered: RootAnswered, _slot: int, children: IntArray) -> int:
            best = np.lexsort((-chances[children], -heights[children]))
            best = best[chances[children[best]] > 0.0]
            return int(children[best[0]]) if len(best) else NO_NODE

        return follow(answered, _rule(answered, choose))

    def _acceptable(self, answered: RootAnswered) -> FloatArray:
        """float64[N]: target probability of the nodes that pass, 0 elsewhere."""
        tree, rows = answered.request.tree, answered.rows
        assert answered.answers.probs is not None, (
            "the verifier declared that it needs target_probs"
        )
        probs = on_host(answered.answers.probs)
        logs = np.log(probs, out=np.zeros_like(probs), where=probs > 0.0)
        entropy = -(probs * logs).sum(axis=1)
        threshold = np.minimum(self.epsilon, self.delta * np.exp(-entropy))
        above = np.where(tree.parents == NO_NODE, -1, rows[tree.parents])
        chances = np.where(above >= 0, probs[above, tree.tokens], 0.0)
        return np.where(chances > threshold[above], chances, 0.0)


def _rule(
    answered: RootAnswered, choose: Callable[[RootAnswered, int, IntArray], int]
) -> Callable[[int], Choice]:
    """A rule that takes the child that ``choose`` names, or else the target's own token."""
    tree = answered.request.tree

    def rule(slot: int) -> Choice:
        children = tree.children(slot)
        child = choose(answered, slot, children) if len(children) else NO_NODE
        token = answered.token(slot) if child == NO_NODE else int(tree.tokens[child])
        kept = child != NO_NODE or bool((tree.tokens[children] == token).any())
        return Choice(child, token, len(children) - kept)

    return rule


def _heights(parents: IntArray, depths: IntArray, acceptable: BoolArray) -> IntArray:
    """int64[N]: nodes on the longest path of acceptable nodes under each node."""
    below = np.zeros(len(parents), np.int64)
    for depth in range(int(depths.max()), 0, -1):
        level = np.flatnonzero(acceptable & (depths == depth))
        np.maximum.at(below, parents[level], below[level] + 1)
    return below
