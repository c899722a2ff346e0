"""Guessing the target's sample from its own draw (Staged Speculative Decoding, future work 1).

Under ``match`` the target's next token is the inverse CDF of its distribution at a keyed draw. The
same draw through the draft's distribution gives the same token wherever the two distributions
agree, also at temperatures where the most probable token is a poor guess. What is accepted is
still the target's own token, so the output does not change.

Shape letters: W nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingTransform
from specdec.types import Commit, CommitKind, FloatArray, IntArray, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState

_BINS = 10
_PRIOR_TRIALS = 4.0
_ALMOST_ONE = 1.0 - 1e-9


class DrawGuesser:
    """Puts the guessed token first, with the measured chance that the guess is right.

    The chance is the running agreement between guess and committed token, in ten bins by the
    probability that the draft itself gives to the guess; each bin starts as if it had seen four
    trials at (1 + bin centre) / 2. The other candidates share the rest in their own proportions,
    capped so that the guess stays first.

    Attributes:
        trials, hits: int64[10], guesses whose position was decided, and those that were right.
    """

    def __init__(self) -> None:
        self.trials = np.zeros(_BINS, np.int64)
        self.hits = np.zeros(_BINS, np.int64)
        self._prior = (1.0 + (np.arange(_BINS) + 0.5) / _BINS) / 2.0
        self._guesses: dict[int, dict[int, tuple[int, int]]] = {}

    def agreement(self) -> FloatArray:
        """float64[10]: the estimated chance by bin."""
        return (self.hits + _PRIOR_TRIALS * self._prior) / (self.trials + _PRIOR_TRIALS)

    def rank(
        self,
        state: DecodeState,
        nodes: Nodes,
        transform: SamplingTransform,
        logits: torch.Tensor,
        histories: Sequence[IntArray] | None,
        tokens: IntArray,
        logprobs: FloatArray,
    ) -> tuple[IntArray, FloatArray]:
        """Reorders candidates.

        Args:
            state: holds draws and trees.
            nodes: the W nodes that are answered.
            transform: the target's own.
            logits: [W, V] of the draft.
            histories: for ``transform``.
            tokens: int64[W, K], most probable first.
            logprobs: float64[W, K].

        Returns:
            (tokens, logprobs) of the same shapes, the guess in column 0.
        """
        guess = self._draw(state, nodes, transform, logits, histories)
        same = tokens == guess[:, None]
        chance = np.minimum(np.exp(np.where(same, logprobs, -np.inf)).sum(axis=1), _ALMOST_ONE)
        bins = (chance * _BINS).astype(np.int64)
        self._remember(nodes, guess, bins)
        agreed = np.minimum(self.agreement()[bins], _ALMOST_ONE)
        first = np.log(agreed)[:, None]
        rest = logprobs + (np.log1p(-agreed) - np.log1p(-chance))[:, None]
        line = np.concatenate([guess[:, None], tokens], axis=1)
        scores = np.concatenate([first, np.minimum(rest, first)], axis=1)
        twice = np.concatenate([np.zeros_like(same[:, :1]), same], axis=1)
        order = np.argsort(twice, axis=1, kind="stable")[:, : tokens.shape[1]]
        return np.take_along_axis(line, order, axis=1), np.take_along_axis(scores, order, axis=1)

    def commit(self, commit: Commit) -> None:
        """Counts which guesses on the committed path were right, and forgets those that left."""
        guesses = self._guesses.get(commit.request)
        if guesses is None or commit.kind is CommitKind.NONE:
            return
        decided = [*commit.retired_tokens[1:].tolist(), commit.next_token]
        for node_id, token in zip(commit.retired_ids.tolist(), decided, strict=True):
            if node_id in guesses:
                guess, chance_bin = guesses.pop(node_id)
                self.trials[chance_bin] += 1
                self.hits[chance_bin] += guess == token
        kept = set(commit.kept_ids.tolist())
        self._guesses[commit.request] = {i: g for i, g in guesses.items() if i in kept}

    def close(self, request_id: int) -> None:
        """Forgets a request; its counts stay."""
        self._guesses.pop(request_id, None)

    def _draw(
        self,
        state: DecodeState,
        nodes: Nodes,
        transform: SamplingTransform,
        logits: torch.Tensor,
        histories: Sequence[IntArray] | None,
    ) -> IntArray:
        uniforms = []
        for request_id, ids in nodes.items:
            tree = state.requests[request_id].tree
            positions = tree.positions[tree.slots(ids)] + 1
            uniforms.append(state.draws.uniform(request_id, positions, Purpose.TARGET))
        return transform.sample(logits, np.concatenate(uniforms), histories)

    def _remember(self, nodes: Nodes, guess: IntArray, bins: IntArray) -> None:
        start = 0
        for request_id, ids in nodes.items:
            stop = start + len(ids)
            pairs = zip(guess[start:stop].tolist(), bins[start:stop].tolist(), strict=True)
            self._guesses.setdefault(request_id, {}).update(zip(ids.tolist(), pairs, strict=True))
            start = stop
