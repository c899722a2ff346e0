"""Prompt lookup: what followed the longest earlier occurrence of the current suffix.

Shape letters: W nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count, validated
from specdec.sources.suffix import SuffixAutomaton
from specdec.types import NO_NODE, Candidates, Commit, CommitKind, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

_PRIOR_TRIALS = 4.0
_PRIOR_SCALE = 2.0
_MAX_BIN = 32


class _Confidence:
    """How often the tokens seen after a match of some length held the next token.

    A running share per match length, started as if it had seen 4 trials at length / (length + 2).
    """

    def __init__(self) -> None:
        lengths = np.arange(_MAX_BIN + 1)
        self._trials = [_PRIOR_TRIALS] * len(lengths)
        self._hits = (_PRIOR_TRIALS * lengths / (lengths + _PRIOR_SCALE)).tolist()

    def __call__(self, length: int) -> float:
        at = min(length, _MAX_BIN)
        return self._hits[at] / self._trials[at]

    def observe(self, length: int, hit: bool) -> None:
        """Counts one decided position."""
        at = min(length, _MAX_BIN)
        self._trials[at] += 1.0
        self._hits[at] += hit


class _Text:
    """One request's committed tokens as an automaton, and where its nodes stand in it."""

    def __init__(self, request: RequestState, min_match: int, max_match: int) -> None:
        self.request = request
        self.automaton = SuffixAutomaton()
        self.confidence = _Confidence()
        self._bounds = (min_match, max_match)
        self._places: dict[int, tuple[int, int]] = {}
        self.extend(request.tokens.tolist())

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds committed tokens, noting for each whether the match before it held it."""
        automaton = self.automaton
        for token in tokens:
            state, length = automaton.suffix(self._bounds[1])
            if length >= self._bounds[0]:
                self.confidence.observe(length, token in automaton.next[state])
            automaton.append(token)
        self._places.clear()

    def place(self, slot: int) -> tuple[int, int]:
        """(state, length): the longest earlier occurrence of what ends at the node."""
        tree = self.request.tree
        node_id = int(tree.ids[slot])
        known = self._places.get(node_id)
        if known is None:
            parent = int(tree.parents[slot])
            if parent == NO_NODE:
                known = self.automaton.suffix(self._bounds[1])
            else:
                known = self.automaton.advance(
                    *self.place(parent), int(tree.tokens[slot]), self._bounds[1]
                )
            self._places[node_id] = known
        return known

    def candidates(self, slot: int, k: int) -> list[tuple[float, int]]:
        """(probability, token) of at most ``k`` continuations, best first.

        A match of length L keeps c(L) of the mass that is left for its own continuations, by
        occurrences with the most recent one counted twice, and leaves the rest to shorter matches.
        """
        automaton = self.automaton
        state, length = self.place(slot)
        left = 1.0
        found: dict[int, float] = {}
        while length >= self._bounds[0] and len(found) < k:
            mass = left * self.confidence(length)
            left -= mass
            following = automaton.next[state]
            latest = max(automaton.last[s] for s in following.values()) if following else 0
            weights = {
                token: automaton.count[s] + (automaton.last[s] == latest)
                for token, s in following.items()
            }
            total = sum(weights.values())
            for token, weight in weights.items():
                found[token] = found.get(token, 0.0) + mass * weight / total
            state = automaton.link[state]
            length = automaton.length[state] if state >= 0 else 0
        ranked = sorted(((p, token) for token, p in found.items()), key=lambda c: (-c[0], c[1]))
        return ranked[:k]


class PromptLookupSource:
    """Continues each node as its longest match in prompt and output was continued.

    Costs no model and needs no corpus. Nodes without a match of ``min_match`` tokens get count 0.
    """

    needs = Needs()
    gives_probs = False
    vocab_size: int | None = None

    @validated
    def __init__(
        self,
        *,
        min_match: Count = 1,
        max_match: Count = 16,
    ) -> None:
        """Sets the lengths of matches.

        Args:
            min_match: tokens that must match at least.
            max_match: tokens that are looked at; a longer match counts as one of this length.

        Raises:
            ValueError: unless 1 <= min_match <= max_match.
        """
        if min_match > max_match:
            raise ValueError(
                f"min_match={min_match} is more than max_match={max_match}: no match could be both"
            )
        self.counters = SourceCounters()
        self._bounds = (min_match, max_match)
        self._texts: dict[int, _Text] = {}

    def open(self, request: RequestState) -> None:
        """Reads the prompt."""
        self._texts[request.id] = _Text(request, *self._bounds)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Up to ``k`` continuations of each node's longest match."""
        answer = Candidates.empty(len(nodes), k)
        row = 0
        for request_id, ids in nodes.items:
            text = self._texts[request_id]
            for slot in text.request.tree.slots(ids).tolist():
                found = text.candidates(slot, k)
                num = len(found)
                if num:
                    answer.tokens[row, :num] = [token for _, token in found]
                    answer.logprobs[row, :num] = np.log([p for p, _ in found])
                    answer.counts[row] = num
                row += 1
        return answer

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Reads the committed tokens."""
        for commit in commits:
            text = self._texts.get(commit.request)
            if text is not None and commit.kind is not CommitKind.NONE:
                committed = [*commit.retired_tokens[1:].tolist(), commit.next_token]
                if commit.prefix_len + 1 - len(committed) == text.automaton.size:
                    text.extend(committed)

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._texts.pop(request_id, None)
