"""A verifier outside the library: accepts tokens among the target's k best. Lossy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from specdec.interfaces import Verifier
from specdec.parts.fields import Count, validated
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import NO_NODE, Lossless, Needs, Verdict
from specdec.verifiers.walk import Choice, follow, target_probs


class TopK(Verifier):
    """Follows the most probable child that is among the target's ``k`` most probable tokens."""

    needs = Needs(target_probs=True)  # answers carry the target's distributions
    lossless = Lossless.LOSSY  # printed in tables and by `specdec verify`

    @validated
    def __init__(self, *, k: Count) -> None:
        """Takes the keys of its YAML.

        Args:
            k: number of the target's tokens that are accepted; 1 is plain greedy decoding.
        """
        self.k = k

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        """One verdict per request, whose root is answered: a walk down its tree."""
        return [follow(request, partial(self._rule, request.tree)) for request in requests]

    def _rule(self, tree: TokenTree, slot: int) -> Choice:
        """At one answered node: the child to follow, or the token after the node."""
        children = tree.children(slot)
        probs = target_probs(tree, slot)  # float64[V], after temperature and filters
        right = np.argsort(-probs, kind="stable")[: self.k]
        good = children[np.isin(tree.tokens[children], right)]
        if not len(good):
            return Choice(NO_NODE, int(tree.answers[slot]), num_rejected=len(children))
        best = int(good[probs[tree.tokens[good]].argmax()])
        return Choice(best, int(tree.tokens[best]), num_rejected=len(children) - 1)
