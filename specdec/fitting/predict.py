"""Predicts tokens per pass under a law for given passes, and measures them in logs.

Shape letters: R requests, T positions, K draft tokens per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.fitting.law import HitLaw
from specdec.fitting.observations import HEURISTIC, DraftedRequest, heuristic_next
from specdec.fitting.requests import UNKNOWN
from specdec.types import FloatArray, IntArray

_SIMULATED = 400  # requests
_LENGTH = 400  # positions of each simulated request
_DEPTHS = 32  # depths with a hit rate of their own in simulations
_MATCH_DRAFT = 7  # draft tokens per pass into which match sequences are split


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPasses:
    """Emitted tokens and target passes of each request, float64[R]."""

    tokens: FloatArray
    passes: FloatArray

    @property
    def mean(self) -> float:
        return float(self.tokens.sum() / self.passes.sum())

    @property
    def standard_error(self) -> float:
        """The standard error of the mean (a ratio of sums); NaN for fewer than two requests."""
        count = len(self.tokens)
        if count < 2:
            return float("nan")
        rest = self.tokens - self.mean * self.passes
        return float(np.sqrt((rest**2).sum() * count / (count - 1)) / self.passes.sum())

    @property
    def spread(self) -> float:
        """The standard deviation of tokens per pass between requests; NaN for fewer than two."""
        each = self.tokens / self.passes
        return float(each.std(ddof=1)) if len(each) > 1 else float("nan")


def measured(samples: Sequence[DraftedRequest]) -> MeasuredPasses:
    """Counts tokens and passes; match sequences are split into passes of 7 draft tokens."""
    pairs = [_played(sample) for sample in samples]
    tokens, passes = np.array(pairs, float).T
    return MeasuredPasses(tokens=tokens, passes=passes)


def predicted(law: HitLaw, samples: Sequence[DraftedRequest]) -> float:
    """Predicts tokens per pass under a law, for passes with the draft tokens of the samples.

    Passes are weighted by how often their number of draft tokens occurs; the adaptive schedule is
    simulated.
    """
    if any(sample.schedule == HEURISTIC for sample in samples):
        return _adaptive(law)
    counts: dict[int, float] = {}
    for sample in samples:
        if sample.request.matches is not None:
            counts[_MATCH_DRAFT] = counts.get(_MATCH_DRAFT, 0.0) + len(sample.request.matches)
            continue
        for number, count in zip(sample.drafted.tolist(), sample.request.counts, strict=True):
            counts[number] = counts.get(number, 0.0) + float(count)
    total = sum(counts.values())
    return sum(law.tokens_per_pass(k) * count for k, count in counts.items()) / total


def simulated_spread(law: HitLaw, samples: Sequence[DraftedRequest], seed: int = 0) -> float:
    """Simulates requests of median length; returns their standard deviation of tokens per pass.

    NaN for match sequences and for the adaptive schedule.
    """
    if any(sample.request.matches is not None or sample.schedule for sample in samples):
        return float("nan")
    length = int(np.median([sample.tokens for sample in samples]))
    longest = int(np.median(np.concatenate([sample.drafted for sample in samples])))
    length = max(min(length, 2000), 8)
    rng = np.random.default_rng(seed)
    hits = law.draw_hits(rng, _SIMULATED, length + longest + 1, min(longest, _DEPTHS) or 1)
    tokens, passes = _walk(_reaches(hits, longest), length, np.full(_SIMULATED, longest), False)
    return float((tokens / passes).std(ddof=1))


def _adaptive(law: HitLaw, seed: int = 0) -> float:
    rng = np.random.default_rng(seed)
    hits = law.draw_hits(rng, _SIMULATED, 2 * _LENGTH, _DEPTHS)
    start = np.full(_SIMULATED, 5)
    tokens, passes = _walk(_reaches(hits, _LENGTH), _LENGTH, start, True)
    return float(tokens.sum() / passes.sum())


def _reaches(hits: np.ndarray, longest: int) -> IntArray:
    """Returns int64[R, T], the right draft tokens in a row of a chain that starts there."""
    requests, length, depths = hits.shape
    reach = np.zeros((requests, length), np.int64)
    alive = np.ones((requests, length), bool)
    for depth in range(min(longest, length)):
        ahead = np.zeros((requests, length), bool)
        ahead[:, : length - depth] = hits[:, depth:, min(depth, depths - 1)]
        alive &= ahead
        if not alive.any():
            break
        reach += alive
    return reach


def _walk(
    reach: IntArray, length: int, planned: IntArray, adapts: bool
) -> tuple[FloatArray, FloatArray]:
    """Simulates passes until each request has ``length`` tokens; returns (tokens [R], passes [R]).

    ``planned`` is the number of draft tokens per pass; with ``adapts`` it follows ``HEURISTIC``.
    """
    rows = np.arange(len(reach))
    at, passes = np.zeros(len(reach), np.int64), np.zeros(len(reach))
    while (at < length).any():
        open_ = at < length
        accepted = np.minimum(reach[rows, np.minimum(at, reach.shape[1] - 1)], planned)
        if adapts:
            planned = np.where(open_, heuristic_next(planned, accepted), planned)
        at = np.where(open_, at + accepted + 1, at)
        passes += open_
    return at.astype(float), passes


def _played(sample: DraftedRequest) -> tuple[float, float]:
    matches = sample.request.matches
    if matches is None:
        return sample.tokens, sample.passes
    known = matches[matches != UNKNOWN]
    rate = known.mean() if len(known) else 0.0
    filled = np.where(
        matches == UNKNOWN, np.random.default_rng(0).random(len(matches)) < rate, matches == 1
    )
    reach = _reaches(filled[None, :, None], _MATCH_DRAFT)
    tokens, passes = _walk(reach, len(matches), np.array([_MATCH_DRAFT]), False)
    return float(tokens[0]), float(passes[0])
