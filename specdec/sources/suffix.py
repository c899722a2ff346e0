"""An online suffix automaton over tokens (Blumer et al. 1985), with occurrence counts.

A *state* represents all substrings with the same end positions; ``length`` is the length of the
longest of them, and ``link`` the state of its longest suffix with additional end positions. The
links form the suffix tree of the reversed text, so this is a suffix tree that grows to the right.

Several sequences may share one automaton (Blumer et al. 1987). A removed sequence only lowers the
counts; a state of count 0 is skipped by every query and takes memory until the automaton is built
again.
"""

from __future__ import annotations

from collections.abc import Sequence


class SuffixAutomaton:
    """All substrings of a growing token sequence, or of several.

    Attributes:
        size: number of appended tokens, removed ones included.
        next: per state: token -> state.
        link: per state: linked state; -1 at the root (the empty string).
        length: per state: length of its longest string.
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

        Every suffix occurs once more. Counting them walks up the links; the walk has one step per
        distinct set of end positions among the suffixes: short in text, up to size / period for
        periodic sequences.
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
        """Uncounts a sequence that was appended after ``begin``, and is not the current one."""
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
        """Token -> number of its occurrences after the state's strings, the latest counted twice.

        Of sequences that were removed, the latest occurrence may still be counted once.
        """
        count, last = self.count, self.last
        following = {t: after for t, after in self.next[state].items() if count[after]}
        latest = max((last[after] for after in following.values()), default=0)
        return {t: count[after] + (last[after] == latest) for t, after in following.items()}

    def shorter(self, state: int) -> tuple[int, int]:
        """(state, length) of the longest suffix of the state's strings that occurs elsewhere."""
        state = self.link[state]
        return state, self.length[state] if state >= 0 else 0

    def suffix(self, max_length: int) -> tuple[int, int]:
        """(state, length) of the longest suffix with an earlier occurrence, at most ``max_length``.

        The length is 0 if there is none.
        """
        state = max(self.link[self._whole], 0)
        return self._cut(state, self.length[state], max_length)

    def advance(self, state: int, length: int, token: int, max_length: int) -> tuple[int, int]:
        """(state, length) of the longest match after ``token``, which is not appended."""
        while state >= 0 and not self.has(state, token):
            state = self.link[state]
            length = min(length, self.length[state]) if state >= 0 else 0
        if state < 0:
            return 0, 0
        return self._cut(self.next[state][token], length + 1, max_length)

    def _cut(self, state: int, length: int, max_length: int) -> tuple[int, int]:
        """Shortens a match to ``max_length`` tokens."""
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
        """The state of the longest string of ``state`` and then ``token``, and of no longer one."""
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
