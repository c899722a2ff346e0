"""Suffix decoding: continuations of the current suffix in this request and in finished ones.

SuffixDecoding (Oliaro et al., arXiv 2411.04975) keeps one suffix tree per request and one of all
finished requests, and drafts what followed earlier occurrences of the last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count, Positive, Text, validated
from specdec.sources.lookup import extend
from specdec.sources.matches import Confidence, TreeMatches, continuations, ranked_candidates
from specdec.sources.suffix import SuffixAutomaton
from specdec.sources.suffix_cache import CachedText, SuffixCache, read_texts
from specdec.types import Candidates, Commit, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


@dataclass(slots=True)
class _Texts:
    """What a request is matched against.

    Attributes:
        own: prompt and output of the request itself.
        cache: finished requests.
        cached: tokens of the request that ``cache`` has followed.
        version: of the cache that ``cache`` refers to.
    """

    request: RequestState
    own: TreeMatches
    cache: TreeMatches
    version: int = -1


class SuffixSource(TokenSource):
    """Proposes continuations of each node's longest matches, in its request and in finished ones.

    Each of the two texts gives a node's match to the continuations that followed it, by frequency
    and by how often matches of that length were right (``matches.continuations``). A text is used
    down to a depth of ``factor`` times the length of the root's match in it, at most ``max_depth``
    (SuffixDecoding 3.2: MAX_SPEC = alpha p); so long matches make long drafts.

    A request enters the cache, prompt and output, when it is closed. Beyond ``max_tokens`` the
    oldest requests are evicted. With a verifier that is lossless token for token, the output does
    not depend on the cache. A distribution for rejection verifiers is not given: the cache depends
    on the order in which requests finish, and so would the output.

    Attributes:
        cache: the finished requests.
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
        """Sets lengths and memory, and reads a saved cache.

        Args:
            vocab_size: of the target, for saved caches.
            min_match: minimum number of matching tokens. Default: 1.
            max_match: maximum number; longer matches count as this length. Default: 32.
            factor: draft tokens per matching token (the paper's alpha). Default: 4.
            max_depth: maximum number of draft tokens. Default: 32.
            max_tokens: tokens of finished requests that are kept; the oldest requests are evicted.
                Default: 100,000.
            repeats: also propose what followed when exactly the same prompt was decoded before.
                False: such requests are removed when the prompt is opened again, so that warm-up
                and repeated measurements do not copy their own output. Default: false.
            path: cache that an earlier run has saved. Default: start empty.
            save: file that the cache is written to whenever no request is open. Default: none.

        Raises:
            ValueError: unless 1 <= min_match <= max_match.
            UserError: ``path`` cannot be read, or belongs to another vocabulary.
        """
        if min_match > max_match:
            raise ValueError(
                f"min_match={min_match} is more than max_match={max_match}; lower source.min_match"
            )
        self.counters = SourceCounters()
        self.vocab_size: int | None = vocab_size
        self.cache = SuffixCache(max_tokens)
        self._vocab_size = vocab_size
        self._bounds = {"min_match": min_match, "max_match": max_match}
        self._factor, self._max_depth = factor, max_depth
        self._repeats, self._save = repeats, save
        self._confidence = Confidence()  # of the cache, over all requests
        self._texts: dict[int, _Texts] = {}
        for text in [] if path is None else read_texts(path, vocab_size=vocab_size):
            self.cache.add(text)

    def open(self, request: RequestState) -> None:
        """Builds the automaton of the prompt."""
        if not self._repeats:
            self.cache.forget(request.tokens)
        own = TreeMatches(SuffixAutomaton(), Confidence(), **self._bounds)
        extend(own, request.tokens.tolist())
        cache = TreeMatches(self.cache.automaton, self._confidence, **self._bounds)
        self._texts[request.id] = _Texts(request, own, cache)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Up to ``k`` continuations of each node's longest matches."""
        rows = []
        for request_id, ids in nodes.items:
            tree = state.requests[request_id].tree
            texts = self._texts[request_id]
            for slot in tree.slots(ids).tolist():
                deep = self._deep_enough(self._current(texts), int(tree.depths[slot]))
                rows.append(continuations(deep, tree, slot, k, min_match=self._bounds["min_match"]))
        return ranked_candidates(rows, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Appends the committed tokens; a repeated commit is ignored."""
        for commit in commits:
            texts = self._texts.get(commit.request)
            if texts is None:
                continue
            tokens = commit.new_tokens
            if commit.prefix_len + 1 - len(tokens) != texts.own.automaton.size:
                continue
            self._current(texts)
            for token in tokens:
                texts.cache.observe(token)
                texts.cache.follow([token])
            extend(texts.own, tokens)

    def close(self, request_id: int) -> None:
        """Moves the request's text to the cache; saves it if no other request is open."""
        texts = self._texts.pop(request_id, None)
        if texts is None:
            return
        tokens = texts.request.tokens[: texts.own.automaton.size].copy()
        self.cache.add(CachedText(tokens, texts.request.num_prompt))
        if self._save is not None and not self._texts:
            self.cache.save(self._save, vocab_size=self._vocab_size)

    def _current(self, texts: _Texts) -> _Texts:
        """The request's texts; matches are found again where the cache has changed."""
        if texts.version != self.cache.version:
            texts.version, texts.cache.automaton = self.cache.version, self.cache.automaton
            texts.cache.at_root((0, 0))
            size = texts.own.automaton.size
            recent = texts.request.tokens[max(0, size - self._bounds["max_match"]) : size]
            texts.cache.follow(recent.tolist())
        return texts

    def _deep_enough(self, texts: _Texts, depth: int) -> list[TreeMatches]:
        """The texts whose match at the root is long enough for children of a node at ``depth``."""
        limits = [
            (text, min(self._max_depth, max(1, int(self._factor * text.root[1]))))
            for text in (texts.own, texts.cache)
        ]
        return [text for text, limit in limits if depth < limit]
