"""Shape letter: W nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.tree import TokenTree
from specdec.types import NO_NODE, Candidates

_PRIOR_TRIALS = 4.0
_PRIOR_SCALE = 2.0
_MAX_BIN = 32

Match = tuple[int, int]
"""(state of an automaton, number of tokens that match)."""


class SuffixAutomaton:
    """All substrings of a growing token sequence, or of several, with their occurrences.

    Blumer et al. 1985 (one text), Blumer et al. 1987 (several). A *state* represents all substrings
    with the same end positions; ``length`` is the length of the longest of them, and ``link`` the
    state of its longest suffix with additional end positions. Removing a sequence only lowers the
    counts; a state of count 0 is skipped by every query and takes memory until the automaton is
    built again.

    Attributes:
        size: number of appended tokens, including removed ones.
        next: per state: token -> state.
        link: per state: linked state; -1 at the root (the empty string).
        count: per state: number of occurrences of its strings.
        last: per state: position of the last token of the latest occurrence.
    """

    def __init__(self) -> None:
        self.size = 0
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.last = [-1]
        self._whole = 0

    def append(self, token: int) -> None:
        """Appends a token, in amortised constant time except for the counts.

        Counting the suffixes takes one step per distinct set of end positions among them: few steps
        in text, up to size / period for periodic sequences.
        """
        following, link = self.next, self.link
        state = self._whole
        if token in following[state]:  # the sequence so far also occurs in an earlier one
            current = self._only(state, token)
        else:
            current = self._new({}, 0, self.length[state] + 1)
            while state >= 0 and token not in following[state]:
                following[state][token] = current
                state = link[state]
            link[current] = self._only(state, token) if state >= 0 else 0
        self._whole = current
        count, last, position = self.count, self.last, self.size
        state = current
        while state > 0:
            count[state] += 1
            last[state] = position
            state = link[state]
        self.size += 1

    def begin(self) -> None:
        """Starts another sequence; no substring crosses its start."""
        self._whole = 0

    def remove(self, tokens: Sequence[int]) -> None:
        """Removes a sequence that was appended after ``begin`` and is not the current one."""
        following, link, count = self.next, self.link, self.count
        whole = 0
        for token in tokens:
            state = whole = following[whole][token]
            while state > 0:
                count[state] -= 1
                state = link[state]

    def has(self, state: int, token: int) -> bool:
        """Whether ``token`` follows an occurrence of the state's strings."""
        after = self.next[state].get(token)
        return after is not None and self.count[after] > 0

    def followers(self, state: int) -> dict[int, int]:
        """Returns token -> number of occurrences after the strings; the latest counts twice."""
        count, last = self.count, self.last
        following = {t: after for t, after in self.next[state].items() if count[after]}
        latest = max((last[after] for after in following.values()), default=0)
        return {t: count[after] + (last[after] == latest) for t, after in following.items()}

    def shorter(self, state: int) -> tuple[int, int]:
        """Returns (state, length) of the longest suffix of the strings that occurs elsewhere."""
        state = self.link[state]
        return state, self.length[state] if state >= 0 else 0

    def suffix(self, max_length: int) -> tuple[int, int]:
        """Returns (state, length) of the longest suffix that also occurred earlier."""
        state = max(self.link[self._whole], 0)
        return self._cut(state, self.length[state], max_length)

    def advance(self, state: int, length: int, token: int, max_length: int) -> tuple[int, int]:
        """Returns (state, length) of the longest match after ``token``, which is not appended."""
        while state >= 0 and not self.has(state, token):
            state = self.link[state]
            length = min(length, self.length[state]) if state >= 0 else 0
        if state < 0:
            return 0, 0
        return self._cut(self.next[state][token], length + 1, max_length)

    def _cut(self, state: int, length: int, max_length: int) -> tuple[int, int]:
        length = min(length, max_length)
        while state > 0 and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state, length

    def _new(self, following: dict[int, int], link: int, length: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        self.last.append(-1)
        return len(self.next) - 1

    def _only(self, state: int, token: int) -> int:
        """Returns the state whose longest string is that of ``state`` followed by ``token``."""
        after = self.next[state][token]
        if self.length[after] == self.length[state] + 1:
            return after
        return self._split(state, token, after)

    def _split(self, state: int, token: int, after: int) -> int:
        """Clones ``after`` for its strings that have an additional end position."""
        clone = self._new(dict(self.next[after]), self.link[after], self.length[state] + 1)
        self.count[clone], self.last[clone] = self.count[after], self.last[after]
        while state >= 0 and self.next[state].get(token) == after:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[after] = clone
        return clone


class Confidence:
    """Probability that the continuations of a match contain the next token, by match length.

    It is a running success rate per length. Its initial value, length / (length + 2), has the
    weight of 4 trials.
    """

    def __init__(self) -> None:
        lengths = np.arange(_MAX_BIN + 1)
        self._trials = [_PRIOR_TRIALS] * len(lengths)
        self._hits = (_PRIOR_TRIALS * lengths / (lengths + _PRIOR_SCALE)).tolist()

    def __call__(self, length: int) -> float:
        at = min(length, _MAX_BIN)
        return self._hits[at] / self._trials[at]

    def observe(self, length: int, hit: bool) -> None:
        at = min(length, _MAX_BIN)
        self._trials[at] += 1.0
        self._hits[at] += hit


class TreeMatches:
    """The longest matches of one request's nodes in a text, which the caller extends.

    The confidence is updated with committed tokens and may be shared with other requests. Matches
    longer than ``max_match`` count as this length. ``root`` is the match of the committed tokens.
    """

    def __init__(
        self,
        automaton: SuffixAutomaton,
        confidence: Confidence,
        *,
        min_match: int,
        max_match: int,
    ) -> None:
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
        """Replaces the root's match, and drops those of nodes."""
        self.root = root
        self._nodes.clear()

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens to the text, which is the request's own."""
        for token in tokens:
            self.observe(token)
            self.automaton.append(token)
            self.at_root(self.automaton.suffix(self._max))

    def follow(self, tokens: Sequence[int]) -> None:
        """Moves the root's match past tokens that are not part of the text."""
        root = self.root
        for token in tokens:
            root = self.automaton.advance(*root, token, self._max)
        self.at_root(root)

    def match(self, tree: TokenTree, slot: int) -> Match:
        """Returns the longest match of a suffix of the path to the node at ``slot``."""
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
    """Returns (probability, token) of at most ``k`` continuations of a node, best first.

    A match of length L gives the share c(L) of the remaining probability (its ``Confidence``) to
    its continuations, in proportion to their occurrences with the most recent one counted twice,
    and leaves the rest to shorter matches. Of several texts, the match with the highest c(L) comes
    next; if equal, the earlier text.
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
    """Converts (probability, token) pairs of each node to ``Candidates``, at most ``k`` each."""
    candidates = Candidates.empty(len(rows), k)
    for row, ranked in enumerate(rows):
        num = len(ranked)
        if num:
            candidates.tokens[row, :num] = [token for _, token in ranked]
            candidates.logprobs[row, :num] = np.log([p for p, _ in ranked])
            candidates.counts[row] = num
    return candidates
