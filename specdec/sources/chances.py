"""How likely the target is to confirm what its exits say, learned while decoding.

Shape letters: X exits, C bins of confidence.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_BINS = 4
_PRIOR_WEIGHT = 4.0  # tokens that the belief before any observation counts for
_PRIOR_LEFT = 0.8  # share of an exit's errors that the next one is believed to make, too


class ExitChances:
    """Expected acceptance of each exit's best token, given how sure an exit before it was.

    Before any observation an exit is believed to be right as often as it says, and each further
    one to leave four fifths of the errors; both are assumptions that a few tokens outweigh. What is
    seen is counted by the confidence (in ``_BINS`` equal bins) of the exit that was asked.
    """

    def __init__(self, num_exits: int) -> None:
        """Nothing seen yet."""
        self._right = np.zeros((num_exits, num_exits, _BINS))
        self._seen = np.zeros((num_exits, num_exits, _BINS))

    def expected(self, asked: int, other: int, confidence: float) -> float:
        """Expected acceptance of exit ``other``, given ``asked``'s confidence in its own token.

        Args:
            asked: number of an exit whose token is known, from 0.
            other: the same exit, or a later one.
            confidence: probability of ``asked``'s best token, by its own distribution.
        """
        at = asked, other, _bin(confidence)
        believed = 1.0 - (1.0 - confidence) * _PRIOR_LEFT ** (other - asked)
        total = _PRIOR_WEIGHT + self._seen[at]
        return float((_PRIOR_WEIGHT * believed + self._right[at]) / total)

    def learn(self, said: Mapping[int, tuple[int, float]], token: int) -> None:
        """Counts a decided position.

        Args:
            said: exit number -> its best token and the confidence in it, of exits that were read.
            token: that the target decided on.
        """
        for asked, (_, confidence) in said.items():
            for other, (best, _) in said.items():
                if other >= asked:
                    at = asked, other, _bin(confidence)
                    self._seen[at] += 1
                    self._right[at] += best == token


def _bin(confidence: float) -> int:
    return min(_BINS - 1, int(confidence * _BINS))
