"""Proposals from matches: what followed earlier occurrences of a node's last tokens.

Shape letters: W nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.sources.suffix import SuffixAutomaton
from specdec.tree import TokenTree
from specdec.types import NO_NODE, Candidates

_PRIOR_TRIALS = 4.0
_PRIOR_SCALE = 2.0
_MAX_BIN = 32

Match = tuple[int, int]
"""(state of an automaton, number of tokens that match)."""


class Confidence:
    """Probability that the continuations of a match contain the next token, by match length.

    A running success rate per length. Its initial value, length / (length + 2), has the weight of 4
    trials.
    """

    def __init__(self) -> None:
        lengths = np.arange(_MAX_BIN + 1)
        self._trials = [_PRIOR_TRIALS] * len(lengths)
        self._hits = (_PRIOR_TRIALS * lengths / (lengths + _PRIOR_SCALE)).tolist()

    def __call__(self, length: int) -> float:
        at = min(length, _MAX_BIN)
        return self._hits[at] / self._trials[at]

    def observe(self, length: int, hit: bool) -> None:
        """Adds one decided position."""
        at = min(length, _MAX_BIN)
        self._trials[at] += 1.0
        self._hits[at] += hit


class TreeMatches:
    """The longest matches of one request's nodes in a text.

    Attributes:
        automaton: of the text.
        confidence: updated with committed tokens.
        root: match of the committed tokens.
    """

    def __init__(
        self,
        automaton: SuffixAutomaton,
        confidence: Confidence,
        *,
        min_match: int,
        max_match: int,
    ) -> None:
        """Starts with no match.

        Args:
            automaton: of the text, which the caller extends.
            confidence: may be shared with other requests.
            min_match: minimum number of matching tokens.
            max_match: maximum number; longer matches count as this length.
        """
        self.automaton = automaton
        self.confidence = confidence
        self.root: Match = (0, 0)
        self._min, self._max = min_match, max_match
        self._nodes: dict[int, Match] = {}  # node id -> match

    def observe(self, token: int) -> None:
        """Updates the confidence with the token that followed the root's match."""
        state, length = self.root
        if length >= self._min:
            self.confidence.observe(length, self.automaton.has(state, token))

    def at_root(self, root: Match) -> None:
        """Replaces the root's match, and forgets those of nodes."""
        self.root = root
        self._nodes.clear()

    def append(self, token: int) -> None:
        """Appends a token of the request to the text itself."""
        self.automaton.append(token)
        self.at_root(self.automaton.suffix(self._max))

    def follow(self, tokens: Sequence[int]) -> None:
        """Moves the root's match past tokens that are not part of the text."""
        root = self.root
        for token in tokens:
            root = self.automaton.advance(*root, token, self._max)
        self.at_root(root)

    def match(self, tree: TokenTree, slot: int) -> Match:
        """The longest match of a suffix of the path to the node at ``slot``."""
        node_id = int(tree.ids[slot])
        match = self._nodes.get(node_id)
        if match is None:
            parent = int(tree.parents[slot])
            if parent == NO_NODE:
                match = self.root
            else:
                match = self.automaton.advance(
                    *self.match(tree, parent), int(tree.tokens[slot]), self._max
                )
            self._nodes[node_id] = match
        return match


def continuations(
    texts: Sequence[TreeMatches], tree: TokenTree, slot: int, k: int, *, min_match: int
) -> list[tuple[float, int]]:
    """(probability, token) of at most ``k`` continuations of a node, best first.

    A match of length L gives the share c(L) of the remaining probability to its continuations, in
    proportion to their occurrences with the most recent one counted twice, and leaves the rest to
    shorter matches. Of several texts, the match with the highest c(L) comes next.

    Args:
        texts: in the order of preference.
        tree, slot: the node.
        k: maximum number of tokens.
        min_match: minimum length of a match.
    """
    matches = [(text, *text.match(tree, slot)) for text in texts]
    remaining = 1.0
    probs: dict[int, float] = {}
    while len(probs) < k:
        matches = [match for match in matches if match[2] >= min_match]
        if not matches:
            break
        at = 0
        if len(matches) > 1:
            sure = [text.confidence(length) for text, _, length in matches]
            at = sure.index(max(sure))
        text, state, length = matches[at]
        mass = remaining * text.confidence(length)
        remaining -= mass
        weights = text.automaton.followers(state)
        total = sum(weights.values())
        for token, weight in weights.items():
            probs[token] = probs.get(token, 0.0) + mass * weight / total
        matches[at] = (text, *text.automaton.shorter(state))
    ranked = sorted(((p, token) for token, p in probs.items()), key=lambda c: (-c[0], c[1]))
    return ranked[:k]


def ranked_candidates(rows: Sequence[Sequence[tuple[float, int]]], k: int) -> Candidates:
    """Candidates of W nodes from their (probability, token) pairs, at most ``k`` each."""
    candidates = Candidates.empty(len(rows), k)
    for row, ranked in enumerate(rows):
        num = len(ranked)
        if num:
            candidates.tokens[row, :num] = [token for _, token in ranked]
            candidates.logprobs[row, :num] = np.log([p for p, _ in ranked])
            candidates.counts[row] = num
    return candidates
