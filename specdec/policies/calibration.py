"""How far a draft's probabilities can be believed, learnt from the run itself.

A policy that weighs the last nodes of a level against their time needs the probabilities of just
those, and there a draft is least to be trusted: it describes a distribution, while a greedy or
sharpened target goes where that distribution peaks.

Letters: W nodes of one level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.types import Commit, CommitKind, FloatArray, IntArray

_BINS = 16  # of ranks, each twice as wide as the one before
_PRIOR = 2.0  # nodes on the path, expected and seen before any was: believing the draft at first


@dataclass(frozen=True, slots=True)
class _Pending:
    """One level whose fate is open.

    Attributes:
        position: of its nodes.
        ids: int64[W], node ids, most probable first.
        shares: float64[W], what the draft promised.
    """

    position: int
    ids: IntArray
    shares: FloatArray


class RankCalibration:
    """Nodes that were on the target's path against those that the draft promised, by their rank.

    A node's *share* is its probability given that the path runs through the level above. A bin
    holds the nodes of ranks 1, 2-3, 4-7, ... of their levels; its correction is the number of its
    nodes that the path ran through over the sum of their shares. Ranks, because what is weighed is
    the last ranks of a level; shares, because a level behind a miss says nothing about its width.
    """

    def __init__(self) -> None:
        self._seen = np.full(_BINS, _PRIOR)
        self._promised = np.full(_BINS, _PRIOR)
        self._pending: dict[int, deque[_Pending]] = {}

    def open(self, request_id: int) -> None:
        """Starts a request."""
        self._pending[request_id] = deque()

    def promise(self, request_id: int, *, position: int, ids: IntArray, shares: FloatArray) -> None:
        """Notes a level of one request, below all of its that are still open.

        Args:
            request_id: an open request.
            position: of the nodes.
            ids: int64[W], node ids, most probable first.
            shares: float64[W], see above.
        """
        self._pending[request_id].append(_Pending(position, ids, shares))

    def corrected(self, shares: FloatArray) -> FloatArray:
        """float64[W]: what ``shares`` of a level, best first, were worth so far."""
        return shares * (self._seen / self._promised)[_bins(len(shares))]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Settles the levels that have been decided; those behind a miss count for nothing."""
        for commit in commits:
            if commit.kind is CommitKind.NONE or commit.finished:
                continue
            pending = self._pending[commit.request]
            hit = commit.kind is CommitKind.HIT
            path = np.append(commit.retired_ids, commit.root_id) if hit else commit.retired_ids
            while pending and pending[0].position <= commit.prefix_len:
                level = pending.popleft()
                bins = _bins(len(level.ids))
                self._promised += np.bincount(bins, level.shares, _BINS)
                self._seen += np.bincount(bins[np.isin(level.ids, path)], minlength=_BINS)
            if not hit:
                pending.clear()

    def close(self, request_id: int) -> None:
        """Forgets a request; levels that were not decided count for nothing."""
        self._pending.pop(request_id, None)


def _bins(num: int) -> IntArray:
    """int64[num], for ranks 1, 2, ...: 0, 1, 1, 2, 2, 2, 2, ..."""
    return np.minimum(np.log2(np.arange(1, num + 1)).astype(np.int64), _BINS - 1)
