"""The hit law: a model of which draft tokens are accepted, and the tokens per pass it predicts.

A prompt belongs to one of G groups, and each position to one of C classes of difficulty. From one
position to the next the class stays with probability ``stay``; otherwise it is drawn anew from the
weights of the prompt's group. The draft token at depth d below the root (0-based) is right with
probability

    sigmoid(logit(top1_c) + depth_d),

independently of everything else, given the class c. So acceptance differs between prompts by more
than a binomial law allows (groups), and misses cluster (classes that stay). ``depth`` is 0 for a
draft model, whose proposal does not depend on the root; drafts that read the target's hidden
states lose accuracy with the depth.

Shape letters: G groups, C classes, D depths, K draft tokens per pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.types import FloatArray, IntArray

_EDGE = 1e-12  # probabilities are kept this far from 0 and 1 in logarithms


@dataclass(frozen=True, slots=True, kw_only=True)
class HitLaw:
    """The parameters of the law.

    Attributes:
        group_shares: float64[G], share of the prompts in each group.
        weights: float64[G, C], distribution of a newly drawn class; rows sum to 1.
        stay: float64[C], probability to keep the class at the next position.
        top1: float64[C], hit rate at depth 0.
        depth: float64[D], added to the log odds at each depth; the last entry also applies beyond
            D.
    """

    group_shares: FloatArray
    weights: FloatArray
    stay: FloatArray
    top1: FloatArray
    depth: FloatArray

    @property
    def num_parameters(self) -> int:
        groups, classes = self.weights.shape
        stays = classes if classes > 1 else 0
        return groups - 1 + groups * (classes - 1) + stays + classes + len(self.depth) - 1

    def hit_rates(self, num_depths: int) -> FloatArray:
        """Returns float64[C, num_depths], the hit rate by class and depth."""
        added = self.depth[np.minimum(np.arange(num_depths), len(self.depth) - 1)]
        odds = np.log(np.clip(self.top1, _EDGE, 1.0)) - np.log(np.clip(1.0 - self.top1, _EDGE, 1.0))
        rates: FloatArray = 1.0 / (1.0 + np.exp(-(odds[:, None] + added)))
        return rates

    def shares(self) -> FloatArray:
        """Returns float64[G, C], the share of a prompt's positions in each class."""
        unnormalised = self.weights / np.maximum(1.0 - self.stay, _EDGE)
        result: FloatArray = unnormalised / unnormalised.sum(axis=1, keepdims=True)
        return result

    def transitions(self, group: int) -> FloatArray:
        """Returns float64[C, C], the probability of the next position's class (column)."""
        matrix: FloatArray = np.diag(self.stay) + np.outer(1.0 - self.stay, self.weights[group])
        return matrix

    def hit_rate(self) -> float:
        """Returns the share of positions whose first draft token is right."""
        return float(self.group_shares @ self.shares() @ self.top1)

    def tokens_per_pass(self, num_draft_tokens: int) -> float:
        """Returns the expected emitted tokens per target pass of a chain of K draft tokens.

        Prompts are assumed to be equally long, so groups are averaged by their passes per token.
        """
        passes = [1.0 / self._group_tokens(g, num_draft_tokens) for g in range(len(self.weights))]
        return float(1.0 / (self.group_shares @ np.array(passes)))

    def _group_tokens(self, group: int, num_draft_tokens: int) -> float:
        """Uses that the classes at the starts of passes form a Markov chain, so it is exact."""
        step = self.transitions(group)
        hits = self.hit_rates(max(num_draft_tokens, 1))
        alive = np.eye(len(step))  # [class at the start of the pass, class at the current depth]
        starts = np.zeros_like(step)
        accepted = np.zeros(len(step))
        for depth in range(num_draft_tokens):
            starts += (alive * (1.0 - hits[:, depth])) @ step
            alive = alive * hits[:, depth]
            accepted += alive.sum(axis=1)
            alive = alive @ step
        starts += alive @ step  # the bonus token takes a position without a draft token
        root = _stationary(starts)
        return 1.0 + float(root @ accepted)

    def draw_hits(
        self, rng: np.random.Generator, num_prompts: int, length: int, num_depths: int
    ) -> np.ndarray:
        """Draws bool[num_prompts, length, num_depths], True where a draft token is right.

        All depths of a position share one uniform number.
        """
        groups = rng.choice(len(self.weights), size=num_prompts, p=self.group_shares)
        classes = self._draw_classes(rng, groups, length)
        uniform = rng.random((num_prompts, length))
        hits: np.ndarray = uniform[:, :, None] < self.hit_rates(num_depths)[classes]
        return hits

    def _draw_classes(self, rng: np.random.Generator, groups: IntArray, length: int) -> IntArray:
        num = len(groups)
        edges = np.cumsum(self.weights, axis=1)[groups]
        first = np.cumsum(self.shares(), axis=1)[groups]
        last = self.weights.shape[1] - 1
        classes = np.empty((num, length), np.int64)
        classes[:, 0] = np.minimum((first < rng.random((num, 1))).sum(axis=1), last)
        for at in range(1, length):
            drawn = np.minimum((edges < rng.random((num, 1))).sum(axis=1), last)
            stays = rng.random(num) < self.stay[classes[:, at - 1]]
            classes[:, at] = np.where(stays, classes[:, at - 1], drawn)
        return classes

    def as_lists(self) -> dict[str, Any]:
        return {
            "group_shares": self.group_shares.tolist(),
            "weights": self.weights.tolist(),
            "stay": self.stay.tolist(),
            "top1": self.top1.tolist(),
            "depth": self.depth.tolist(),
        }

    @staticmethod
    def of(values: Mapping[str, Any]) -> HitLaw:
        """Returns the law from plain lists; the inverse of ``as_lists``."""
        return HitLaw(**{name: np.asarray(value, float) for name, value in values.items()})


def _stationary(matrix: FloatArray) -> FloatArray:
    size = len(matrix)
    system = np.vstack([matrix.T - np.eye(size), np.ones(size)])
    right = np.zeros(size + 1)
    right[-1] = 1.0
    solved: FloatArray = np.linalg.lstsq(system, right, rcond=None)[0].astype(np.float64)
    return solved
