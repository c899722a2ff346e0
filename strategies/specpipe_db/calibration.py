from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.types import Commit, CommitKind, FloatArray, IntArray

_BINS = 16  # of ranks, each twice as wide as the one before
_PRIOR = 2.0  # initial count of nodes on the path, observed and expected: a correction of 1


@dataclass(frozen=True, slots=True)
class _CalibratedLevel:
    """A submitted level whose nodes are not decided yet; see ``RankCalibration.add_level``."""

    position: int
    ids: IntArray
    shares: FloatArray


class RankCalibration:
    """Ratio of observed to predicted nodes on the target's path, by the node's rank in its level.

    A draft's probabilities are least reliable in the last ranks of a level, because it describes a
    distribution, while a greedy or sharpened target follows the peaks of that distribution.

    A node's *share* is its probability given that the path passes through the level above, because
    levels below a miss are not counted. A bin covers the ranks 1, 2-3, 4-7, ...; its correction is
    the number of its nodes on the path divided by the sum of their shares.
    """

    def __init__(self) -> None:
        self._observed = np.full(_BINS, _PRIOR)
        self._predicted = np.full(_BINS, _PRIOR)
        self._pending: dict[int, deque[_CalibratedLevel]] = {}

    def open(self, request_id: int) -> None:
        self._pending[request_id] = deque()

    def add_level(
        self, request_id: int, *, position: int, ids: IntArray, shares: FloatArray
    ) -> None:
        """Adds a level at ``position``, below all levels of the request that are not decided yet.

        ``ids``, int64[W], are most probable first, as are their ``shares``, float64[W].
        """
        self._pending[request_id].append(_CalibratedLevel(position, ids, shares))

    def corrected(self, shares: FloatArray) -> FloatArray:
        """Returns float64[W]: shares of a level, best first, times the correction of their bins."""
        return shares * (self._observed / self._predicted)[_bins(len(shares))]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Counts the levels that the commits decide, and discards those below a miss."""
        for commit in commits:
            if commit.finished:
                continue
            pending = self._pending[commit.request]
            hit = commit.kind is CommitKind.HIT
            path = np.append(commit.retired_ids, commit.root_id) if hit else commit.retired_ids
            while pending and pending[0].position <= commit.prefix_len:
                level = pending.popleft()
                bins = _bins(len(level.ids))
                self._predicted += np.bincount(bins, level.shares, _BINS)
                self._observed += np.bincount(bins[np.isin(level.ids, path)], minlength=_BINS)
            if not hit:
                pending.clear()

    def close(self, request_id: int) -> None:
        self._pending.pop(request_id, None)


def _bins(num: int) -> IntArray:
    """Returns int64[num], the bins 0, 1, 1, 2, 2, 2, 2, ... of ranks 1, 2, ..."""
    return np.minimum(np.log2(np.arange(1, num + 1)).astype(np.int64), _BINS - 1)
