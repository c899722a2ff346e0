"""Prompt lookup: proposes the tokens that followed earlier occurrences of the current suffix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count, validated
from specdec.sources.matches import Confidence, TreeMatches, continuations, ranked_candidates
from specdec.sources.suffix import SuffixAutomaton
from specdec.types import Candidates, Commit, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class PromptLookupSource(TokenSource):
    """Proposes the continuations of each node's longest match in prompt and output.

    Needs no model and no corpus. Nodes without a match of ``min_match`` tokens get count 0.
    """

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
        self._min, self._max = min_match, max_match
        self._texts: dict[int, TreeMatches] = {}

    def open(self, request: RequestState) -> None:
        """Builds the automaton of the prompt."""
        text = TreeMatches(
            SuffixAutomaton(), Confidence(), min_match=self._min, max_match=self._max
        )
        self._texts[request.id] = text
        extend(text, request.tokens.tolist())

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Up to ``k`` continuations of each node's longest match."""
        rows = []
        for request_id, ids in nodes.items:
            texts, tree = [self._texts[request_id]], state.requests[request_id].tree
            for slot in tree.slots(ids).tolist():
                rows.append(continuations(texts, tree, slot, k, min_match=self._min))
        return ranked_candidates(rows, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Appends the committed tokens; a repeated commit is ignored."""
        for commit in commits:
            text = self._texts.get(commit.request)
            if text is not None:
                tokens = commit.new_tokens
                if commit.prefix_len + 1 - len(tokens) == text.automaton.size:
                    extend(text, tokens)

    def close(self, request_id: int) -> None:
        """Drops the request."""
        self._texts.pop(request_id, None)


def extend(text: TreeMatches, tokens: Sequence[int]) -> None:
    """Appends committed tokens to a request's own text, and updates the confidence with each."""
    for token in tokens:
        text.observe(token)
        text.append(token)
