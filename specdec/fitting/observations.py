"""Turns acceptance logs into arrays of hits and misses by position and depth.

A pass that accepted a of k draft tokens shows a hits, then a miss if a < k. After k accepted draft
tokens the target emits a bonus token, at a position that has no draft token. So consecutive passes
show the sequence of hits, except for those positions.

Shape letters: S segments, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.fitting.requests import UNKNOWN, AcceptanceLog, RequestLog
from specdec.types import FloatArray, IntArray

_LONGEST = 160  # positions of a segment; short ones fit faster, but each starts from the shares
_HEURISTIC_START = 5  # draft tokens of the first pass under transformers' schedule
HEURISTIC = "heuristic"
"""The schedule of transformers' assisted generation.

The next pass has two more draft tokens if all were accepted, otherwise one less, but at least 1.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Segments of consecutive positions.

    Attributes:
        hits: int64[S, T], 1 for a hit, 0 for a miss, ``UNKNOWN`` without a verified draft token and
            beyond the end of the segment.
        depths: int64[S, T], depth of the draft token below its root, from 0.
        prompts: int64[S], index of the request.
        weights: float64[S], how often the segment occurred.
    """

    hits: IntArray
    depths: IntArray
    prompts: IntArray
    weights: FloatArray

    @property
    def num_known(self) -> float:
        """The weighted number of positions with a verified draft token."""
        return float((self.weights[:, None] * (self.hits != UNKNOWN)).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedRequest:
    """A request with the number of draft tokens of every pass.

    ``drafted`` is int64[N]. ``schedule`` is ``HEURISTIC``, or "" if the log has the numbers or they
    are constant.
    """

    request: RequestLog
    drafted: IntArray
    schedule: str = ""

    @property
    def passes(self) -> float:
        return float(self.request.counts.sum())

    @property
    def tokens(self) -> float:
        return float((self.request.counts * (self.request.accepted + 1)).sum())


def samples_of(log: AcceptanceLog) -> tuple[list[DraftedRequest], str]:
    """Returns the requests of a log with draft tokens per pass, and a note if these are inferred.

    If the log does not have them, they follow transformers' schedule, if every pass obeys it and
    the longest pass exceeds its first number. Otherwise they are the largest number accepted in the
    log.
    """
    requests = log.requests
    unknown = [r for r in requests if r.drafted is None and r.matches is None]
    most = max((int(r.accepted.max(initial=0)) for r in unknown), default=0)
    if unknown and most > _HEURISTIC_START:
        planned = [_heuristic(request) for request in requests]
        pairs = [(r, p) for r, p in zip(requests, planned, strict=True) if p is not None]
        if len(pairs) == len(requests):
            return [DraftedRequest(request=r, drafted=p, schedule=HEURISTIC) for r, p in pairs], (
                "draft tokens per pass by the schedule of transformers' assisted generation, which"
                " every pass obeys"
            )
    note = f"draft tokens per pass taken as {most}, the most accepted" if unknown else ""
    samples = []
    for request in requests:
        drafted = request.drafted
        if drafted is None:
            drafted = np.full(len(request.accepted), max(most, 1))
        samples.append(DraftedRequest(request=request, drafted=drafted))
    return samples, note


def heuristic_next(planned: IntArray, accepted: IntArray) -> IntArray:
    following: IntArray = np.where(accepted == planned, planned + 2, np.maximum(planned - 1, 1))
    return following


def _heuristic(request: RequestLog) -> IntArray | None:
    """Returns int64[N], the schedule along a request; None if the request does not follow it."""
    if not request.ordered or request.matches is not None or request.drafted is not None:
        return None
    starts = set(np.cumsum((0, *request.turns)).tolist())
    planned = np.empty(len(request.accepted), np.int64)
    for at, accepted in enumerate(request.accepted.tolist()):
        if at in starts:
            planned[at] = _HEURISTIC_START
        else:
            before = request.accepted[at - 1], planned[at - 1]
            planned[at] = before[1] + 2 if before[0] == before[1] else max(before[1] - 1, 1)
        if accepted > planned[at]:
            return None
    return planned


def observe(samples: Sequence[DraftedRequest]) -> Observations:
    rows: list[tuple[list[int], list[int], int, float]] = []
    for number, sample in enumerate(samples):
        request = sample.request
        if request.matches is not None:
            hits = request.matches.tolist()
            rows += [(h, [0] * len(h), number, 1.0) for h in _pieces(hits)]
            continue
        passes = zip(request.accepted.tolist(), sample.drafted.tolist(), strict=True)
        if not request.ordered:
            counts = request.counts.tolist()
            for (accepted, drafted), count in zip(passes, counts, strict=True):
                if count > 0:
                    rows.append((*_pass(accepted, drafted), number, count))
            continue
        shown = [_pass(accepted, drafted) for accepted, drafted in passes]
        hits = [hit for part, _ in shown for hit in part]
        depths = [depth for _, part in shown for depth in part]
        pieces = zip(_pieces(hits), _pieces(depths), strict=True)
        rows += [(h, d, number, 1.0) for h, d in pieces]
    rows = [row for row in rows if row[0]]
    length = max((len(row[0]) for row in rows), default=1)
    known = np.full((len(rows), length), UNKNOWN, np.int64)
    depths_ST = np.zeros((len(rows), length), np.int64)
    for at, (hits, depths, _, _) in enumerate(rows):
        known[at, : len(hits)] = hits
        depths_ST[at, : len(depths)] = depths
    return Observations(
        hits=known,
        depths=depths_ST,
        prompts=np.array([row[2] for row in rows], np.int64),
        weights=np.array([row[3] for row in rows], float),
    )


def _pass(accepted: int, drafted: int) -> tuple[list[int], list[int]]:
    """Returns hits and depths; what a pass accepted beyond ``drafted`` is unknown (censored)."""
    judged = min(accepted, drafted)
    last = 0 if accepted < drafted else UNKNOWN
    return [1] * judged + [UNKNOWN] * (accepted - judged) + [last], list(range(accepted + 1))


def _pieces(values: list[int]) -> list[list[int]]:
    return [values[at : at + _LONGEST] for at in range(0, len(values), _LONGEST)]
