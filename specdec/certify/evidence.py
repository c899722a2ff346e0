"""Measures evidence against a distribution by e-values, which stay valid for any number of counts.

An *e-value* is a non-negative statistic whose mean is at most 1 if the tested law is true, so by
Markov's inequality it reaches 1 / a with probability at most a. Here it is a likelihood ratio: the
likelihood of the counts under a mixture of laws around the tested one, divided by that under the
law itself. Unlike a chi-square test it needs no least number of expected counts, so cells of small
probability are not merged. It may be computed from tokens of sequences, whose number of visits is
random (a test martingale, Ville 1939; Ramdas et al. 2023, "Game-theoretic statistics"). The mean of
e-values is an e-value, even if they depend on each other.

Shape letters: C cells of a law, M concentrations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from specdec.types import FloatArray, IntArray

_CONCENTRATIONS = torch.tensor([4.0, 32.0, 256.0, 2048.0], dtype=torch.float64)  # of the mixture


def log_evidence(counts: IntArray, law: FloatArray) -> float:
    """Returns the natural logarithm of the e-value of counts[C] against ``law``[C].

    The mixture has Dirichlet laws with mean ``law`` and four concentrations, for alternatives that
    are far from it down to a few percent. Infinite if a cell of probability 0 has counts.
    """
    seen = np.flatnonzero(counts)
    if not law[seen].all():
        return math.inf
    number, probs = torch.from_numpy(counts[seen]).double(), torch.from_numpy(law[seen])
    prior = _CONCENTRATIONS[:, None] * probs  # [M, C]
    mixed = (torch.lgamma(prior + number) - torch.lgamma(prior)).sum(dim=1)
    mixed += torch.lgamma(_CONCENTRATIONS) - torch.lgamma(_CONCENTRATIONS + number.sum())
    return log_sum(mixed.tolist()) - math.log(len(mixed)) - float((number * probs.log()).sum())


def log_sum(logs: Sequence[float]) -> float:
    """Returns log(sum(exp(logs))) without overflow."""
    best = max(logs)
    if math.isinf(best):
        return best
    return best + math.log(math.fsum(math.exp(value - best) for value in logs))
