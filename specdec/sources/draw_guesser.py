"""Guesses the target's sample from its own draw (Staged Speculative Decoding, future work 1).

Under ``match`` the target's next token is the inverse CDF of its distribution at a keyed draw. The
same draw applied to the draft's distribution gives the same token wherever the two distributions
agree, also at temperatures at which the most probable token is a poor guess. Accepted tokens are
still the target's own, so the output does not change.

Shape letters: W nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingTransform
from specdec.types import Commit, FloatArray, IntArray, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState

_BINS = 10
_PRIOR_TRIALS = 4.0
_ALMOST_ONE = 1.0 - 1e-9


class DrawGuesser:
    """Places the guessed token first, with the measured probability that the guess is right.

    This probability is the running agreement between guess and committed token, in ten bins by the
    draft's probability of the guess; each bin starts with four trials at (1 + bin centre) / 2. The
    other candidates share the remaining probability in proportion, capped so that the guess stays
    first.

    Attributes:
        trials: int64[10], guesses whose position was decided.
        hits: int64[10], guesses that were right.
    """

    def __init__(self) -> None:
        self.trials = np.zeros(_BINS, np.int64)
        self.hits = np.zeros(_BINS, np.int64)
        self._prior = (1.0 + (np.arange(_BINS) + 0.5) / _BINS) / 2.0
        self._guesses: dict[int, dict[int, tuple[int, int]]] = {}  # request -> id -> (token, bin)

    def agreement(self) -> FloatArray:
        """float64[10]: estimated probability that a guess is right, by bin."""
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
            state: provides the keyed draws and the trees.
            nodes: the W expanded nodes.
            transform: the target's sampling transform.
            logits: [W, V] of the draft.
            histories: for ``transform``.
            tokens: int64[W, K], most probable first.
            logprobs: float64[W, K].

        Returns:
            (tokens, logprobs) of the same shapes, with the guess in column 0.
        """
        guess = transform.sample(logits, target_draws(state, nodes), histories)
        same = tokens == guess[:, None]
        prob = np.minimum(np.exp(np.where(same, logprobs, -np.inf)).sum(axis=1), _ALMOST_ONE)
        bins = (prob * _BINS).astype(np.int64)
        for request_id, ids, rows in nodes.packed():
            pairs = zip(guess[rows].tolist(), bins[rows].tolist(), strict=True)
            self._guesses.setdefault(request_id, {}).update(zip(ids.tolist(), pairs, strict=True))
        agreed = np.minimum(self.agreement()[bins], _ALMOST_ONE)
        first = np.log(agreed)[:, None]
        others = logprobs + (np.log1p(-agreed) - np.log1p(-prob))[:, None]
        line = np.concatenate([guess[:, None], tokens], axis=1)
        scores = np.concatenate([first, np.minimum(others, first)], axis=1)
        duplicate = np.concatenate([np.zeros_like(same[:, :1]), same], axis=1)
        order = np.argsort(duplicate, axis=1, kind="stable")[:, : tokens.shape[1]]
        return np.take_along_axis(line, order, axis=1), np.take_along_axis(scores, order, axis=1)

    def commit(self, commit: Commit) -> None:
        """Counts the decided guesses, and drops those of pruned nodes."""
        guesses = self._guesses.get(commit.request)
        if guesses is None:
            return
        for node_id, token in zip(commit.retired_ids.tolist(), commit.new_tokens, strict=True):
            if node_id in guesses:
                guess, bin_index = guesses.pop(node_id)
                self.trials[bin_index] += 1
                self.hits[bin_index] += guess == token
        kept = set(commit.kept_ids.tolist())
        self._guesses[commit.request] = {i: g for i, g in guesses.items() if i in kept}

    def close(self, request_id: int) -> None:
        """Drops the request's guesses; the counts remain."""
        self._guesses.pop(request_id, None)


def target_draws(state: DecodeState, nodes: Nodes) -> FloatArray:
    """float64[W]: the draws by which the target selects the tokens after W nodes."""
    uniforms = []
    for request_id, ids in nodes.items:
        tree = state.requests[request_id].tree
        positions = tree.positions[tree.slots(ids)] + 1
        uniforms.append(state.draws.uniform(request_id, positions, Purpose.TARGET))
    return uniforms[0] if len(uniforms) == 1 else np.concatenate(uniforms)
