"""Rank tails: the distribution of the target token's rank where it is not the first candidate.

    P(rank r | not first) = (1 - miss) r^-decay / Z  for 2 <= r <= 64, else no candidate (miss)

``fit_tail`` measures (decay, miss) from a rank vector. If a log has accepted lengths only,
``tail_of`` gives the values of a draft of that hit rate: regressions over 16 published rank vectors
of drafts from 68M to 7B (docs/calibration.md has their sources).

Shape letters: R ranks, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit

from specdec.errors import UserError
from specdec.types import FloatArray

_RANKS = np.arange(2, 65.0)  # those that ``SyntheticPair`` can draw
_DECAY = (1.508, 0.494)  # constant, slope over the log odds of the hit rate
_MISS = (-1.605, -1.565)  # the same for the log odds of the miss share


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTail:
    """The parameters of a tail, as in the module's formula."""

    decay: float
    miss: float

    def shares(self) -> FloatArray:
        """Returns float64[63], P(rank r | not first) for r = 2 to 64."""
        shape = _RANKS**-self.decay
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


def rank_vector(name: str, shares: Sequence[float] | FloatArray, miss: float) -> RankVector:
    """Returns shares scaled to a sum of 1 with the miss share; refuses other sums than about 1."""
    array, miss = np.asarray(shares, float), max(float(miss), 0.0)
    total = float(array.sum()) + miss
    if not 0.97 <= total <= 1.03 or (array < 0).any() or len(array) < 2:
        raise UserError(
            f"shares of ranks must be at least 0 and sum to 1 with the miss share, not {total:.3f}"
        )
    return RankVector(name=name, shares=array / total, miss=miss / total)


def fit_tail(vector: RankVector) -> RankTail:
    """Fits a tail by maximum likelihood; ``miss`` reproduces the share beyond the R ranks."""
    below = vector.shares[1 : len(_RANKS) + 1]
    if below.sum() <= 0.0:
        return RankTail(decay=2.0, miss=float(vector.miss > 0.0))
    logs = np.log(_RANKS[: len(below)])

    def cost(decay: float) -> float:
        return float(decay * (below @ logs) + below.sum() * np.log(np.exp(-decay * logs).sum()))

    decay = float(minimize_scalar(cost, bounds=(0.0, 4.0), method="bounded").x)
    inside = RankTail(decay=decay, miss=0.0).shares()[: len(below)].sum()
    found = below.sum() / (below.sum() + vector.miss) / inside
    return RankTail(decay=decay, miss=float(1.0 - min(found, 1.0)))


def tail_of(hit_rate: float) -> RankTail:
    """Returns the tail that the regressions predict for a draft of this hit rate."""
    odds = float(logit(np.clip(hit_rate, 0.005, 0.995)))
    decay = float(np.clip(_DECAY[0] + _DECAY[1] * odds, 0.5, 3.0))
    return RankTail(decay=decay, miss=float(expit(_MISS[0] + _MISS[1] * odds)))


def class_decays(top1: FloatArray, tail: RankTail) -> FloatArray:
    """Returns float64[C], the tail's decay, reduced in classes where rank 2 would beat rank 1."""
    decays = np.linspace(tail.decay, 0.0, 200)
    second = [RankTail(decay=float(decay), miss=tail.miss).shares()[0] for decay in decays]
    fits = np.outer(1.0 - top1, second) <= top1[:, None]
    result: FloatArray = decays[np.where(fits.any(axis=1), fits.argmax(axis=1), -1)]
    return result
