"""An online suffix automaton over tokens (Blumer et al. 1985), with occurrence counts.

A *state* represents all substrings with the same end positions; ``length`` is the length of the
longest of them, and ``link`` the state of its longest suffix with additional end positions.
"""

from __future__ import annotations


class SuffixAutomaton:
    """All substrings of a growing token sequence.

    Attributes:
        size: number of appended tokens.
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
        following, link, length = self.next, self.link, self.length
        current = self._new({}, 0, self.size + 1)
        state = self._whole
        while state >= 0 and token not in following[state]:
            following[state][token] = current
            state = link[state]
        if state < 0:
            link[current] = 0
        else:
            after = following[state][token]
            if length[after] == length[state] + 1:
                link[current] = after
            else:
                link[current] = self._split(state, token, after)
        self._whole = current
        count, last, position = self.count, self.last, self.size
        state = current
        while state > 0:
            count[state] += 1
            last[state] = position
            state = link[state]
        self.size += 1

    def suffix(self, max_length: int) -> tuple[int, int]:
        """(state, length) of the longest suffix with an earlier occurrence, at most ``max_length``.

        The length is 0 if there is none.
        """
        state = max(self.link[self._whole], 0)
        return self._cut(state, self.length[state], max_length)

    def advance(self, state: int, length: int, token: int, max_length: int) -> tuple[int, int]:
        """(state, length) of the longest match after ``token``, which is not appended."""
        while state >= 0 and token not in self.next[state]:
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

    def _split(self, state: int, token: int, after: int) -> int:
        """Clones ``after`` for its strings that have an additional end position."""
        clone = self._new(dict(self.next[after]), self.link[after], self.length[state] + 1)
        self.count[clone], self.last[clone] = self.count[after], self.last[after]
        while state >= 0 and self.next[state].get(token) == after:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[after] = clone
        return clone
