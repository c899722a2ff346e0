"""A model of which draft tokens the target accepts, and the tokens per pass that follow from it.

Each position belongs to one of C classes of difficulty. From one position to the next the class
stays with probability ``stay``; otherwise it is drawn anew from the weights. The draft token at
depth d below the root (0-based) is right with probability

    sigmoid(logit(top1_c) + depth_d),

independently of everything else, given the class c. So misses cluster. ``depth`` is 0 for a draft
model, whose proposal does not depend on the root; drafts that read the target's hidden states lose
accuracy with the depth.

Where the first candidate is wrong, the target's token has the rank

    P(rank r | not first) = (1 - miss) r^-decay / Z  for 2 <= r <= 64, else no candidate (miss).

Logs do not have ranks: ``tail_of`` estimates (decay, miss) from the draft's hit rate, by regression
over 16 published rank vectors of drafts with 68M to 7B parameters (docs/calibration.md).

Shape letters: C classes, D depths, K draft tokens per pass, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csc_array
from scipy.sparse.linalg import spsolve
from scipy.special import expit, logit

from specdec.types import FloatArray

_EDGE = 1e-12  # probabilities are kept this far from 0 and 1 in logarithms
_RANKS = np.arange(2, 65.0)  # those that ``SyntheticPair`` can draw
_DECAY = (1.508, 0.494)  # constant, slope over the log odds of the hit rate
_MISS = (-1.605, -1.565)  # the same for the log odds of the miss share
_MOST_ADAPTIVE = 64  # draft tokens per pass of the adaptive schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceModel:
    """Parameters of the acceptance model; by default one class, and the depth has no effect."""

    top1: FloatArray  # float64[C], hit rate at depth 0
    # float64[C], probability to keep the class at the next position
    stay: FloatArray = field(default_factory=lambda: np.zeros(1))
    # float64[D], added to the log odds at each depth; the last entry also applies beyond D
    depth: FloatArray = field(default_factory=lambda: np.zeros(1))
    # float64[C], distribution of a newly drawn class
    weights: FloatArray = field(default_factory=lambda: np.ones(1))

    def hit_rates(self, num_depths: int) -> FloatArray:
        added = self.depth[np.minimum(np.arange(num_depths), len(self.depth) - 1)]
        odds = logit(np.clip(self.top1, _EDGE, 1.0 - _EDGE))
        rates: FloatArray = expit(odds[:, None] + added)
        return rates

    def hit_rate(self) -> float:
        occupied = self.weights / np.maximum(1.0 - self.stay, _EDGE)
        return float(occupied @ self.top1 / occupied.sum())

    def tokens_per_pass(self, num_draft_tokens: int) -> float:
        """Returns the expected emitted tokens per target pass of a chain of K draft tokens."""
        return self._tokens([num_draft_tokens], [0], [0])

    def adaptive_tokens_per_pass(self) -> float:
        """Returns the expected tokens per pass under the schedule of transformers' assisted
        generation: two more draft tokens after all were accepted, otherwise one less, at least 1.
        """
        states = np.arange(_MOST_ADAPTIVE)
        more, less = np.minimum(states + 2, states[-1]), np.maximum(states - 1, 0)
        return self._tokens((states + 1).tolist(), more.tolist(), less.tolist())

    def _tokens(self, counts: Sequence[int], more: Sequence[int], less: Sequence[int]) -> float:
        """Returns the exact mean of tokens per pass over a Markov chain: state i drafts
        ``counts[i]`` tokens; state ``more[i]`` follows if all were accepted, else ``less[i]``.
        """
        hits, size = self.hit_rates(max(counts) + 1), (len(counts), len(self.top1))
        step = np.diag(self.stay) + np.outer(1.0 - self.stay, self.weights)
        alive, missed = [np.eye(len(step))], [np.zeros_like(step)]  # [class at start, class now]
        accepted = [np.zeros(len(step))]  # before each depth, as the sums of misses
        for hit in hits.T:
            missed.append(missed[-1] + (alive[-1] * (1.0 - hit)) @ step)
            accepted.append(accepted[-1] + (alive[-1] * hit).sum(axis=1))
            alive.append((alive[-1] * hit) @ step)
        starts = np.zeros(size + size)
        for at, count in enumerate(counts):
            starts[at, :, less[at]] += missed[count]
            starts[at, :, more[at]] += alive[count] @ step  # the bonus token has no draft token
        system = starts.reshape(-1, size[0] * size[1]).T - np.eye(size[0] * size[1])
        system[-1] = 1.0  # the stationary distribution sums to 1
        root = spsolve(csc_array(system), np.eye(len(system))[-1])
        return float(1.0 + root @ np.concatenate([accepted[count] for count in counts]))


# Ranks where the first candidate is wrong.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTail:
    decay: float
    miss: float

    def shares(self) -> FloatArray:
        shape = _RANKS**-self.decay
        result: FloatArray = shape * (1.0 - self.miss) / shape.sum()
        return result


def tail_of(hit_rate: float) -> RankTail:
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
