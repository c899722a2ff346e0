"""Sources that copy tokens from earlier text: the request's own, or also that of finished requests.

A saved cache is an archive of arrays: ``tokens`` (all sequences, oldest first), ``lengths`` (of the
sequences) and ``num_prompt`` (of their prompts). Shape letters: W nodes, T tokens of a text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.errors import UserError
from specdec.files import ArchiveFormat
from specdec.interfaces import TokenSource
from specdec.parts.fields import Count, Positive, Text, validated
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import NO_NODE, Candidates, Commit, IntArray, Nodes, Output

FORMAT = ArchiveFormat(
    name="specdec-suffix-cache",
    version=1,
    arrays=("tokens", "lengths", "num_prompt"),
    what="a suffix cache",
    missing="source.save=FILE writes one at the end of a run",
    other="give a file that source.save=FILE has written",
    again="write it again with source.save=FILE",
)
_PRIOR_TRIALS = 4.0
_PRIOR_SCALE = 2.0
_MAX_BIN = 32

Match = tuple[int, int]
"""(State of a ``SuffixAutomaton``, length): a suffix of a token path that occurs in its text."""


class SuffixAutomaton:
    """Finds all substrings of a growing token sequence, or of several, and counts them.

    Blumer et al. 1985 (one text), Blumer et al. 1987 (several). A *state* represents all substrings
    with the same end positions; ``length`` is the length of the longest of them, and ``link`` the
    state of its longest suffix with additional end positions. ``remove`` only lowers counts:
    queries skip a state whose ``count`` is 0, and it takes memory until a new automaton is built.

    Attributes:
        size: number of appended tokens, including removed ones.
        next: per state: token -> state of the strings followed by that token.
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

        Counting takes one step per distinct set of end positions of the suffixes: few steps in
        ordinary text, up to size / period in periodic sequences.
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
        """Returns token -> count after the state's strings; the latest occurrence counts twice."""
        count, last = self.count, self.last
        following = {t: after for t, after in self.next[state].items() if count[after]}
        latest = max((last[after] for after in following.values()), default=0)
        return {t: count[after] + (last[after] == latest) for t, after in following.items()}

    def suffix(self, max_length: int) -> tuple[int, int]:
        """Returns (state, length <= ``max_length``) of the longest suffix that occurred earlier."""
        state = max(self.link[self._whole], 0)
        return self._cut(state, self.length[state], max_length)

    def advance(self, state: int, length: int, token: int, max_length: int) -> tuple[int, int]:
        """Returns (state, length) of the longest suffix of a match and ``token`` that occurs."""
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
        length = self.length[state] + 1
        if self.length[after] == length:
            return after
        # A clone is for its strings that have an additional end position.
        clone = self._new(dict(self.next[after]), self.link[after], length)
        self.count[clone], self.last[clone] = self.count[after], self.last[after]
        while state >= 0 and self.next[state].get(token) == after:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[after] = clone
        return clone


class Confidence:
    """Estimates, by match length, the probability that a match's continuations have the next token.

    The estimate is the success rate so far at that length. Its initial value, length / (length +
    2), has the weight of 4 trials.
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
    """Finds, for each node of one request, the longest suffix of its path that a text contains.

    ``automaton`` stores the text: either the request's own (call ``extend`` with committed tokens,
    which are appended) or that of other requests (call ``follow``). ``root`` is the match of the
    committed tokens. ``confidence`` may be shared with other requests. Matches of more than
    ``max_match`` tokens count as that many; those of fewer than ``min_match`` do not change it.
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
        self._min, self._max = min_match, max_match
        self.at_root((0, 0))

    def at_root(self, root: Match) -> None:
        """Sets the root's match, and forgets the stored matches of the nodes."""
        self.root = root
        self._nodes: dict[int, Match] = {}  # node id -> match

    def observe(self, token: int) -> None:
        """Updates the confidence with the token that followed the root's match."""
        state, length = self.root
        if length >= self._min:
            self.confidence.observe(length, self.automaton.has(state, token))

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens to the text (the request's own) and updates the root's match."""
        for token in tokens:
            self.observe(token)
            self.automaton.append(token)
            self.at_root(self.automaton.suffix(self._max))

    def follow(self, tokens: Sequence[int]) -> None:
        """Updates the root's match after committed tokens, which are not appended to the text."""
        root = self.root
        for token in tokens:
            root = self.automaton.advance(*root, token, self._max)
        self.at_root(root)

    def match(self, tree: TokenTree, slot: int) -> Match:
        """Returns the longest suffix of the path to the node at ``slot`` that the text contains."""
        if (parent := int(tree.parents[slot])) == NO_NODE:
            return self.root
        node_id = int(tree.ids[slot])
        if node_id not in self._nodes:
            above, token = self.match(tree, parent), int(tree.tokens[slot])
            self._nodes[node_id] = self.automaton.advance(*above, token, self._max)
        return self._nodes[node_id]


def continuations(
    texts: Sequence[TreeMatches], tree: TokenTree, slot: int, k: int, *, min_match: int
) -> list[tuple[float, int]]:
    """Returns (probability, token) of at most ``k`` continuations of a node, best first.

    Matches are used in turn, each time the one with the highest ``Confidence`` c among ``texts``
    (if equal, of the earlier text). It gives the share c of the remaining probability to its
    continuations, in proportion to their occurrences with the most recent one counted twice; its
    text then continues with the next shorter match.
    """
    matches = [(text, *text.match(tree, slot)) for text in texts]
    remaining = 1.0
    probs: dict[int, float] = {}
    while len(probs) < k:
        matches = [match for match in matches if match[2] >= min_match]
        if not matches:
            break
        sure = [text.confidence(length) for text, _, length in matches]
        at = sure.index(max(sure))
        text, state, _ = matches[at]
        mass = remaining * sure[at]
        remaining -= mass
        weights = text.automaton.followers(state)
        total = sum(weights.values())
        for token, weight in weights.items():
            probs[token] = probs.get(token, 0.0) + mass * weight / total
        state = text.automaton.link[state]  # the longest suffix that also occurs elsewhere
        matches[at] = (text, state, text.automaton.length[state] if state >= 0 else 0)
    ranked = sorted(((p, token) for token, p in probs.items()), key=lambda c: (-c[0], c[1]))
    return ranked[:k]


class CachedText(NamedTuple):
    """The tokens of a finished request, int64[T]: ``num_prompt`` prompt tokens, then the output."""

    tokens: IntArray
    num_prompt: int


class SuffixCache:
    """Stores the texts of the latest finished requests, at most ``max_tokens`` tokens in all.

    Evicted tokens stay in ``automaton`` until it has more than 2 ``max_tokens`` tokens; then a new
    automaton of the stored texts replaces it.
    """

    def __init__(self, max_tokens: int) -> None:
        self.automaton = SuffixAutomaton()
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self.texts: list[CachedText] = []

    def add(self, text: CachedText) -> None:
        """Adds a text and evicts the oldest; a text that is too long loses its first tokens."""
        cut = max(0, len(text.tokens) - self._max_tokens)
        if cut:
            text = CachedText(text.tokens[cut:], max(0, text.num_prompt - cut))
        while self.texts and self.num_tokens + len(text.tokens) > self._max_tokens:
            self._remove(self.texts.pop(0))
        self._append(text)
        if self.automaton.size > 2 * self._max_tokens:  # frees the memory of removed requests
            texts, self.texts = self.texts, []
            self.automaton, self.num_tokens = SuffixAutomaton(), 0
            for kept in texts:
                self._append(kept)

    def forget(self, prompt: IntArray) -> None:
        """Removes the requests with exactly this prompt."""
        for at in range(len(self.texts) - 1, -1, -1):
            tokens, num_prompt = self.texts[at]
            if np.array_equal(tokens[:num_prompt], prompt):
                self._remove(self.texts.pop(at))

    def _append(self, text: CachedText) -> None:
        self.automaton.begin()
        for token in text.tokens.tolist():
            self.automaton.append(token)
        self.texts.append(text)
        self.num_tokens += len(text.tokens)

    def _remove(self, text: CachedText) -> None:
        self.automaton.remove(text.tokens.tolist())
        self.num_tokens -= len(text.tokens)

    def save(self, path: str | Path, *, vocab_size: int) -> Path:
        tokens = np.concatenate([np.zeros(0, np.int64), *(text.tokens for text in self.texts)])
        arrays = {
            "tokens": tokens.astype(np.int32),
            "lengths": np.array([len(text.tokens) for text in self.texts], np.int64),
            "num_prompt": np.array([text.num_prompt for text in self.texts], np.int64),
        }
        return FORMAT.write(Path(path).expanduser(), {"vocab_size": vocab_size}, arrays)


def read_texts(path: str | Path, *, vocab_size: int, key: str = "source.path") -> list[CachedText]:
    """Reads the requests of a saved cache, oldest first; ``key`` is the option's name in messages.

    Raises:
        UserError: the file is missing, damaged, not a cache, or of another version or vocabulary.
    """
    at = f"{key}={path}"
    head, arrays = FORMAT.read(path, at)
    if head.get("vocab_size") != vocab_size:
        raise UserError(
            f"{at} has tokens of a vocabulary of {head.get('vocab_size')}, the target has"
            f" {vocab_size}; use a cache that the same model family has written"
        )
    tokens, lengths, num_prompt = (arrays[name] for name in FORMAT.arrays)
    if not (
        all(array.ndim == 1 and array.dtype.kind in "iu" for array in arrays.values())
        and len(lengths) == len(num_prompt)
        and ((lengths >= 1) & (num_prompt >= 0) & (num_prompt <= lengths)).all()
        and sum(lengths.tolist()) == len(tokens)
        and ((tokens >= 0) & (tokens < vocab_size)).all()
    ):
        raise UserError(
            f"{at} is damaged: its arrays do not fit each other or the vocabulary; {FORMAT.again}"
        )
    texts = np.split(tokens.astype(np.int64), np.cumsum(lengths))[:-1]
    return list(map(CachedText, texts, num_prompt.tolist()))


class PromptLookupSource(TokenSource):
    """Proposes the tokens that followed earlier occurrences of a node's last tokens in its request.

    It needs no model or corpus. Nodes without a match of ``min_match`` tokens get no candidates.

    Args:
        min_match: minimum number of matching tokens.
        max_match: maximum number of matching tokens; longer matches count as this length.
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
        candidates = Candidates.empty(len(rows), k)
        for row, ranked in enumerate(rows):
            candidates.tokens[row, : len(ranked)] = [token for _, token in ranked]
            candidates.logprobs[row, : len(ranked)] = np.log([p for p, _ in ranked])
            candidates.counts[row] = len(ranked)
        return candidates

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
        """Returns the commits of open requests that have not been applied yet."""
        return [
            commit
            for commit in commits
            if (own := self._own.get(commit.request)) is not None
            and commit.prefix_len + 1 - len(commit.new_tokens) == own.automaton.size
        ]


class SuffixSource(PromptLookupSource):
    """Proposes what followed a node's last tokens earlier, in its own or in finished requests.

    This is SuffixDecoding (Oliaro et al., arXiv 2411.04975). In each text, what followed the
    longest matching suffix of a node's path is scored by frequency and by how often matches of that
    length were right (``suffix.continuations``). A text is used down to a depth of ``factor`` times
    the length of the root's match in it, at most ``max_depth`` (SuffixDecoding 3.2: MAX_SPEC =
    alpha p), so long matches make long drafts.

    When a request is closed, its prompt and output enter the cache. With a verifier that is
    lossless token for token, the output does not depend on the cache. Rejection verifiers cannot be
    used: the cache depends on the order in which requests finish, and so would the output.

    Args:
        vocab_size: size of the target's vocabulary, stored in saved caches.
        min_match: minimum number of matching tokens.
        max_match: maximum number of matching tokens; longer matches count as this length.
        factor: draft tokens per matching token (the paper's alpha).
        max_depth: maximum number of draft tokens.
        max_tokens: maximum number of cached tokens; the oldest requests are evicted.
        repeats: also propose what followed when exactly the same prompt was decoded before. False:
            requests with that prompt are removed from the cache when it is opened again, so that
            warm-up and repeated measurements do not copy their own output.
        path: file of a cache that an earlier run has saved. Default: start empty.
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
        self.vocab_size: int = vocab_size
        self.cache = SuffixCache(max_tokens)
        self._factor, self._max_depth = factor, max_depth
        self._repeats, self._save = repeats, save
        self._confidence = Confidence()  # of the cache, over all requests
        self._cached: dict[int, tuple[RequestState, TreeMatches]] = {}
        for text in [] if path is None else read_texts(path, vocab_size=vocab_size):
            self.cache.add(text)

    def open(self, request: RequestState) -> None:
        if not self._repeats:
            self.cache.forget(request.tokens)
        super().open(request)
        matches = self._matches(self.cache.automaton, self._confidence)
        self._cached[request.id] = request, matches
        self._search_again()

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in self._new(commits):
            matches = self._cached[commit.request][1]
            for token in commit.new_tokens:
                matches.observe(token)
                matches.follow([token])
        super().commit(commits, output)

    def close(self, request_id: int) -> None:
        """Moves the request's text to the cache; saves the cache if no other request is open."""
        if request_id not in self._cached:
            return
        request, own = self._cached.pop(request_id)[0], self._own[request_id]
        super().close(request_id)
        self.cache.add(CachedText(request.tokens[: own.automaton.size].copy(), request.num_prompt))
        self._search_again()
        if self._save is not None and not self._own:
            self.cache.save(self._save, vocab_size=self.vocab_size)

    def _texts(self, request_id: int, depth: int) -> list[TreeMatches]:
        """Returns texts whose root match is long enough to propose below a node at ``depth``."""
        return [
            text
            for text in (self._own[request_id], self._cached[request_id][1])
            if depth < min(self._max_depth, max(1, int(self._factor * text.root[1])))
        ]

    def _search_again(self) -> None:
        """Recomputes the open requests' root matches, because the cache's texts have changed."""
        for request_id, (request, matches) in self._cached.items():
            matches.automaton = self.cache.automaton
            matches.at_root((0, 0))
            size = self._own[request_id].automaton.size
            matches.follow(request.tokens[max(0, size - self._max) : size].tolist())
