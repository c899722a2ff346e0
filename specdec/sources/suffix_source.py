from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.interfaces import TokenSource
from specdec.parts.fields import Count, Positive, Text, validated
from specdec.sources.suffix import (
    Confidence,
    SuffixAutomaton,
    TreeMatches,
    continuations,
    ranked_candidates,
)
from specdec.sources.suffix_cache import CachedText, SuffixCache, read_texts
from specdec.types import Candidates, Commit, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class PromptLookupSource(TokenSource):
    """Proposes what followed earlier occurrences of the last tokens in prompt and output.

    It needs no model and no corpus. Nodes without a match of ``min_match`` tokens get count 0.

    Args:
        min_match: minimum number of matching tokens.
        max_match: maximum number; longer matches count as this length.
    """

    @validated
    def __init__(self, *, min_match: Count = 1, max_match: Count = 16) -> None:
        if min_match > max_match:
            raise ValueError(
                f"min_match={min_match} is more than max_match={max_match}; lower source.min_match"
            )
        self._min, self._max = min_match, max_match
        self._own: dict[int, TreeMatches] = {}

    def open(self, request: RequestState) -> None:
        self._own[request.id] = self._matches(SuffixAutomaton(), Confidence())
        self._own[request.id].extend(request.tokens.tolist())

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        rows = []
        for request_id, ids in nodes.items:
            tree = state.requests[request_id].tree
            for slot in tree.slots(ids).tolist():
                texts = self._texts(request_id, int(tree.depths[slot]))
                rows.append(continuations(texts, tree, slot, k, min_match=self._min))
        return ranked_candidates(rows, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in self._new(commits):
            self._own[commit.request].extend(commit.new_tokens)

    def close(self, request_id: int) -> None:
        self._own.pop(request_id, None)

    def _matches(self, automaton: SuffixAutomaton, confidence: Confidence) -> TreeMatches:
        return TreeMatches(automaton, confidence, min_match=self._min, max_match=self._max)

    def _texts(self, request_id: int, depth: int) -> list[TreeMatches]:
        return [self._own[request_id]]

    def _new(self, commits: Sequence[Commit]) -> list[Commit]:
        """Returns the commits of open requests that continue their texts; drops repeated ones."""
        return [
            commit
            for commit in commits
            if (own := self._own.get(commit.request)) is not None
            and commit.prefix_len + 1 - len(commit.new_tokens) == own.automaton.size
        ]


@dataclass(slots=True)
class _CachedMatches:
    request: RequestState
    matches: TreeMatches
    version: int = -1


class SuffixSource(PromptLookupSource):
    """Proposes continuations of each node's longest matches, in its request and in finished ones.

    This is SuffixDecoding (Oliaro et al., arXiv 2411.04975). Each of the two texts gives a node's
    match to the continuations that followed it, by frequency and by how often matches of that
    length were right (``suffix.continuations``). A text is used down to a depth of ``factor`` times
    the length of the root's match in it, at most ``max_depth`` (SuffixDecoding 3.2: MAX_SPEC =
    alpha p), so long matches make long drafts.

    When a request is closed, its prompt and output enter the cache. With a verifier that is
    lossless token for token, the output does not depend on the cache. Rejection verifiers cannot be
    used: the cache depends on the order in which requests finish, and so would the output.

    Args:
        vocab_size: of the target, for saved caches.
        min_match: minimum number of matching tokens.
        max_match: maximum number; longer matches count as this length.
        factor: draft tokens per matching token (the paper's alpha).
        max_depth: maximum number of draft tokens.
        max_tokens: maximum number of cached tokens; the oldest requests are evicted.
        repeats: also propose what followed when exactly the same prompt was decoded before. False:
            such requests are removed when the prompt is opened again, so that warm-up and repeated
            measurements do not copy their own output.
        path: cache that an earlier run has saved. Default: start empty.
        save: file that the cache is written to whenever no request is open. Default: none.
    """

    @validated
    def __init__(
        self,
        *,
        vocab_size: Count,
        min_match: Count = 1,
        max_match: Count = 32,
        factor: Positive = 4.0,
        max_depth: Count = 32,
        max_tokens: Count = 100_000,
        repeats: bool = False,
        path: Text | None = None,
        save: Text | None = None,
    ) -> None:
        super().__init__(min_match=min_match, max_match=max_match)
        self.vocab_size = vocab_size
        self.cache = SuffixCache(max_tokens)
        self._vocab_size = vocab_size
        self._factor, self._max_depth = factor, max_depth
        self._repeats, self._save = repeats, save
        self._confidence = Confidence()  # of the cache, over all requests
        self._cached: dict[int, _CachedMatches] = {}
        for text in [] if path is None else read_texts(path, vocab_size=vocab_size):
            self.cache.add(text)

    def open(self, request: RequestState) -> None:
        if not self._repeats:
            self.cache.forget(request.tokens)
        super().open(request)
        matches = self._matches(self.cache.automaton, self._confidence)
        self._cached[request.id] = _CachedMatches(request, matches)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in self._new(commits):
            matches = self._current(commit.request)
            for token in commit.new_tokens:
                matches.observe(token)
                matches.follow([token])
        super().commit(commits, output)

    def close(self, request_id: int) -> None:
        """Moves the request's text to the cache; saves it if no other request is open."""
        cached, own = self._cached.pop(request_id, None), self._own.get(request_id)
        super().close(request_id)
        if cached is None or own is None:
            return
        tokens = cached.request.tokens[: own.automaton.size].copy()
        self.cache.add(CachedText(tokens, cached.request.num_prompt))
        if self._save is not None and not self._own:
            self.cache.save(self._save, vocab_size=self._vocab_size)

    def _texts(self, request_id: int, depth: int) -> list[TreeMatches]:
        """Returns the texts whose root match is long enough for children of a node at ``depth``."""
        limits = [
            (text, min(self._max_depth, max(1, int(self._factor * text.root[1]))))
            for text in (self._own[request_id], self._current(request_id))
        ]
        return [text for text, limit in limits if depth < limit]

    def _current(self, request_id: int) -> TreeMatches:
        """Returns the request's matches in the cache, searched again if the cache has changed."""
        cached = self._cached[request_id]
        if cached.version != self.cache.version:
            cached.version, cached.matches.automaton = self.cache.version, self.cache.automaton
            cached.matches.at_root((0, 0))
            size = self._own[request_id].automaton.size
            recent = cached.request.tokens[max(0, size - self._max) : size]
            cached.matches.follow(recent.tolist())
        return cached.matches
