"""Rank tails: the distribution of the target token's rank where it is not the first candidate.

    P(rank r | not first) = (1 - miss) r^-decay / Z  for 2 <= r <= 64, else no candidate (miss)

``fit_tail`` measures (decay, miss) from a rank vector. If a log has accepted lengths only,
``tail_of`` gives the values of a draft of that hit rate: regressions over 16 published rank vectors
of drafts from 68M to 7B (docs/calibration.md has their sources; ``fit_tails`` repeats them).

Shape letters: R ranks, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.types import FloatArray

MAX_RANK = 64
"""The largest rank that ``SyntheticPair`` can draw."""

_DECAY = (1.508, 0.494)  # constant, slope over the log odds of the hit rate
_MISS = (-1.605, -1.565)  # the same for the log odds of the miss share
_MOST_DECAY, _LEAST_DECAY = 4.0, 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTail:
    """The parameters of a tail, as in the module's formula."""

    decay: float
    miss: float

    def shares(self) -> FloatArray:
        """Returns float64[63], P(rank r | not first) for r = 2 to 64."""
        shape = np.arange(2, MAX_RANK + 1) ** -self.decay
        result: FloatArray = shape * (1.0 - self.miss) / shape.sum()
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVector:
    """Measured shares of the target token's rank among the draft's candidates.

    ``shares`` is float64[R], for ranks 1, 2, ...; ``miss`` is the share without a right candidate.
    """

    name: str
    shares: FloatArray
    miss: float


def fit_tail(vector: RankVector) -> RankTail:
    """Fits a tail by maximum likelihood; ``miss`` reproduces the share beyond the R ranks."""
    below = vector.shares[1:MAX_RANK]
    wrong = float(below.sum() + vector.miss)
    if len(below) < 2 or below.sum() <= 0.0:
        return RankTail(decay=2.0, miss=min(vector.miss / wrong, 1.0) if wrong > 0.0 else 0.0)
    ranks = np.arange(2, 2 + len(below))
    decays = np.linspace(_LEAST_DECAY, _MOST_DECAY, 401)
    shapes = ranks[None] ** -decays[:, None]
    logs = np.log(shapes / shapes.sum(axis=1, keepdims=True))
    decay = float(decays[(logs @ below).argmax()])
    whole = np.arange(2, MAX_RANK + 1) ** -decay
    inside = whole[: len(below)].sum() / whole.sum()
    miss = 1.0 - min(below.sum() / wrong / inside, 1.0)
    return RankTail(decay=decay, miss=float(miss))


def fit_tails(vectors: Sequence[RankVector]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Regresses decay, and log odds of miss, on log odds of hits: (constant, slope) of each."""
    tails = [fit_tail(vector) for vector in vectors]
    odds = _odds(np.array([vector.shares[0] for vector in vectors]))
    decay = np.polynomial.polynomial.polyfit(odds, [tail.decay for tail in tails], 1)
    miss = np.polynomial.polynomial.polyfit(odds, _odds(np.array([t.miss for t in tails])), 1)
    return (float(decay[0]), float(decay[1])), (float(miss[0]), float(miss[1]))


def tail_of(hit_rate: float) -> RankTail:
    """Returns the tail that the regressions predict for a draft of this hit rate."""
    odds = float(_odds(np.array([hit_rate]))[0])
    decay = float(np.clip(_DECAY[0] + _DECAY[1] * odds, 0.5, 3.0))
    miss = 1.0 / (1.0 + np.exp(-(_MISS[0] + _MISS[1] * odds)))
    return RankTail(decay=decay, miss=float(miss))


def class_decays(top1: FloatArray, tail: RankTail) -> FloatArray:
    """Returns float64[C], the tail's decay, reduced in classes where rank 2 would beat rank 1."""
    decays = np.full(len(top1), tail.decay)
    grid = np.linspace(tail.decay, 0.0, 200)
    for at, rate in enumerate(top1):
        for decay in grid:
            second = RankTail(decay=float(decay), miss=tail.miss).shares()[0]
            decays[at] = decay
            if (1.0 - rate) * second <= rate:
                break
    return decays


def _odds(share: FloatArray) -> FloatArray:
    clipped = np.clip(share, 0.005, 0.995)
    result: FloatArray = np.log(clipped) - np.log1p(-clipped)
    return result
