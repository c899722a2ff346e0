"""Prompt lookup: proposes the tokens that followed earlier occurrences of the current suffix.

Shape letters: W nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count, validated
from specdec.sources.suffix import SuffixAutomaton
from specdec.types import NO_NODE, Candidates, Commit, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

_PRIOR_TRIALS = 4.0
_PRIOR_SCALE = 2.0
_MAX_BIN = 32


class _Confidence:
    """Probability that the continuations of a match contain the next token, by match length.

    A running ratio per length, initialised with 4 trials at length / (length + 2).
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


class _Text:
    """The suffix automaton of one request's committed tokens, with the matches of its nodes."""

    def __init__(self, request: RequestState, min_match: int, max_match: int) -> None:
        self.request = request
        self.automaton = SuffixAutomaton()
        self.confidence = _Confidence()
        self._bounds = (min_match, max_match)
        self._matches: dict[int, tuple[int, int]] = {}  # node id -> (state, length)
        self.extend(request.tokens.tolist())

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens, and updates the confidence with each."""
        automaton = self.automaton
        for token in tokens:
            state, length = automaton.suffix(self._bounds[1])
            if length >= self._bounds[0]:
                self.confidence.observe(length, token in automaton.next[state])
            automaton.append(token)
        self._matches.clear()

    def match(self, slot: int) -> tuple[int, int]:
        """(state, length) of the longest earlier occurrence of a suffix of the node's path."""
        tree = self.request.tree
        node_id = int(tree.ids[slot])
        match = self._matches.get(node_id)
        if match is None:
            parent = int(tree.parents[slot])
            if parent == NO_NODE:
                match = self.automaton.suffix(self._bounds[1])
            else:
                match = self.automaton.advance(
                    *self.match(parent), int(tree.tokens[slot]), self._bounds[1]
                )
            self._matches[node_id] = match
        return match

    def candidates(self, slot: int, k: int) -> list[tuple[float, int]]:
        """(probability, token) of at most ``k`` continuations, best first.

        A match of length L gives the share c(L) of the remaining probability to its continuations,
        in proportion to their occurrences with the most recent one counted twice, and leaves the
        rest to shorter matches.
        """
        automaton = self.automaton
        state, length = self.match(slot)
        remaining = 1.0
        probs: dict[int, float] = {}
        while length >= self._bounds[0] and len(probs) < k:
            mass = remaining * self.confidence(length)
            remaining -= mass
            following = automaton.next[state]
            latest = max(automaton.last[s] for s in following.values()) if following else 0
            weights = {
                token: automaton.count[s] + (automaton.last[s] == latest)
                for token, s in following.items()
            }
            total = sum(weights.values())
            for token, weight in weights.items():
                probs[token] = probs.get(token, 0.0) + mass * weight / total
            state = automaton.link[state]
            length = automaton.length[state] if state >= 0 else 0
        ranked = sorted(((p, token) for token, p in probs.items()), key=lambda c: (-c[0], c[1]))
        return ranked[:k]


class PromptLookupSource:
    """Proposes the continuations of each node's longest match in prompt and output.

    Needs no model and no corpus. Nodes without a match of ``min_match`` tokens get count 0.
    """

    needs = Needs()
    gives_probs = False
    vocab_size: int | None = None

    @validated
    def __init__(self, *, min_match: Count = 1, max_match: Count = 16) -> None:
        """Sets the lengths of matches.

        Args:
            min_match: minimum number of matching tokens. Default: 1.
            max_match: maximum number; longer matches count as this length. Default: 16.

        Raises:
            ValueError: unless 1 <= min_match <= max_match.
        """
        if min_match > max_match:
            raise ValueError(
                f"min_match={min_match} is more than max_match={max_match}; lower source.min_match"
            )
        self.counters = SourceCounters()
        self._bounds = (min_match, max_match)
        self._texts: dict[int, _Text] = {}

    def open(self, request: RequestState) -> None:
        """Builds the automaton of the prompt."""
        self._texts[request.id] = _Text(request, *self._bounds)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Up to ``k`` continuations of each node's longest match."""
        candidates = Candidates.empty(len(nodes), k)
        row = 0
        for request_id, ids in nodes.items:
            text = self._texts[request_id]
            for slot in text.request.tree.slots(ids).tolist():
                ranked = text.candidates(slot, k)
                num = len(ranked)
                if num:
                    candidates.tokens[row, :num] = [token for _, token in ranked]
                    candidates.logprobs[row, :num] = np.log([p for p, _ in ranked])
                    candidates.counts[row] = num
                row += 1
        return candidates

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Appends the committed tokens; a repeated commit is ignored."""
        for commit in commits:
            text = self._texts.get(commit.request)
            if text is not None:
                tokens = commit.new_tokens
                if commit.prefix_len + 1 - len(tokens) == text.automaton.size:
                    text.extend(tokens)

    def close(self, request_id: int) -> None:
        """Drops the request."""
        self._texts.pop(request_id, None)
