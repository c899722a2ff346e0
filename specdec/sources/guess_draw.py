"""Candidates ranked by the target's own draw (Staged Speculative Decoding, future work 1).

Under ``match`` the target's next token is the inverse CDF of its distribution at a keyed draw u.
Accepted tokens are the target's own, so using that draw to rank candidates does not change the
output. The draft's CDF differs from the target's, so the draft's token at u may be wrong.

Shape letters: W nodes, S tokens of positive probability, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from specdec.device import SupportProbs
from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingTransform
from specdec.types import Candidates, Commit, FloatArray, IntArray, NodeMap, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState

FAR_SHARE = 0.05
"""Weight of the draft's own probability in the scores, which does not depend on u."""

_BINS = 10
_PRIOR_TRIALS = 4.0
_ALMOST_ONE = 1.0 - 1e-9


def target_draws(state: DecodeState, nodes: Nodes) -> FloatArray:
    """Returns float64[W]: the draws with which the target selects the tokens after W nodes."""
    uniforms = []
    for request_id, ids in nodes.items:
        tree = state.requests[request_id].tree
        positions = tree.positions[tree.slots(ids)] + 1
        uniforms.append(state.draws.uniform(request_id, positions, Purpose.TARGET))
    return uniforms[0] if len(uniforms) == 1 else np.concatenate(uniforms)


class NearDraw:
    """Ranks the draft's tokens by their probability near the target's draw u.

    It assumes that the edges of the draft's CDF are off by a random amount with density exp(-abs(x)
    / spread) / (2 spread). A token's score is the probability that its interval, moved by that
    amount, contains u, plus a small share of the token's own probability.
    """

    def __init__(self, *, spread: float) -> None:
        self._spread = spread

    def candidates(
        self,
        transform: SamplingTransform,
        logits: Tensor,
        histories: Sequence[IntArray] | None,
        uniforms: FloatArray,
        k: int,
    ) -> Candidates:
        """Returns the ``k`` best candidates of each node, or fewer if few pass the filters.

        The transform is not greedy; ``uniforms``, float64[W], are the target's draws.
        """
        ids, scores = self._scores(transform, logits, histories, uniforms)
        k = min(k, logits.shape[1])
        if (missing := k - scores.shape[1]) > 0:  # rows of other transforms have k columns too
            scores = np.pad(scores, ((0, 0), (0, missing)))
            ids = None if ids is None else np.pad(ids, ((0, 0), (0, missing)))
        with np.errstate(divide="ignore"):
            best = (-scores).argsort(axis=1, kind="stable")[:, :k]
            logprobs = np.log(np.take_along_axis(scores, best, axis=1))
        return Candidates(
            tokens=best if ids is None else np.take_along_axis(ids, best, axis=1),
            logprobs=logprobs,
            counts=(logprobs > -np.inf).sum(axis=1),
        )

    def _scores(
        self,
        transform: SamplingTransform,
        logits: Tensor,
        histories: Sequence[IntArray] | None,
        uniforms: FloatArray,
    ) -> tuple[IntArray | None, FloatArray]:
        """Returns token ids int64[W, S] (None for all in order) and scores float64[W, S], sum 1."""
        law = transform.distribution(logits, histories)
        ids, probs = (law.ids, law.values) if isinstance(law, SupportProbs) else (None, law)
        cdf = probs.cumsum(axis=1)
        total, draws = cdf[:, -1:], uniforms[:, None]
        edges = cdf / total
        edges -= draws
        edges /= self._spread
        # The density's integral from u to each edge, times 2; the first edge is 0.
        integral = np.copysign(np.expm1(-np.abs(edges)), edges)
        first = np.expm1(-draws / self._spread)
        near = integral.copy()
        near[:, 1:] -= integral[:, :-1]
        near[:, :1] -= first
        near *= (1.0 - FAR_SHARE) / (integral[:, -1:] - first)
        near += probs * (FAR_SHARE / total)
        return ids, near


class DrawGuesser:
    """Places the draft's token at the target's draw first, with its measured hit probability.

    This probability is the running agreement between guess and committed token, in ten bins by the
    draft's probability of the guess; each bin starts with four trials at (1 + bin centre) / 2. The
    other candidates share the remaining probability in proportion, capped so that the guess stays
    first.

    Attributes:
        trials: int64[10], number of guesses whose position was decided.
        hits: int64[10], number of guesses that were right.
    """

    def __init__(self) -> None:
        self.trials = np.zeros(_BINS, np.int64)
        self.hits = np.zeros(_BINS, np.int64)
        self._prior = (1.0 + (np.arange(_BINS) + 0.5) / _BINS) / 2.0
        self._guesses: NodeMap[tuple[int, int]] = NodeMap()  # node -> (token, bin)

    def agreement(self) -> FloatArray:
        """Returns float64[10]: estimated probability that a guess is right, by bin."""
        return (self.hits + _PRIOR_TRIALS * self._prior) / (self.trials + _PRIOR_TRIALS)

    def rank(
        self,
        state: DecodeState,
        nodes: Nodes,
        transform: SamplingTransform,
        logits: Tensor,
        histories: Sequence[IntArray] | None,
        tokens: IntArray,
        logprobs: FloatArray,
    ) -> tuple[IntArray, FloatArray]:
        """Moves the guess to column 0 of ``tokens`` and ``logprobs``, [W, K], best first."""
        guess = transform.sample(logits, target_draws(state, nodes), histories)
        same = tokens == guess[:, None]
        prob = np.minimum(np.exp(np.where(same, logprobs, -np.inf)).sum(axis=1), _ALMOST_ONE)
        bins = (prob * _BINS).astype(np.int64)
        for request_id, ids, rows in nodes.packed():
            pairs = zip(guess[rows].tolist(), bins[rows].tolist(), strict=True)
            self._guesses.update(request_id, ids, pairs)
        agreed = np.minimum(self.agreement()[bins], _ALMOST_ONE)
        first = np.log(agreed)[:, None]
        others = logprobs + (np.log1p(-agreed) - np.log1p(-prob))[:, None]
        line = np.concatenate([guess[:, None], tokens], axis=1)
        scores = np.concatenate([first, np.minimum(others, first)], axis=1)
        duplicate = np.concatenate([np.zeros_like(same[:, :1]), same], axis=1)
        order = np.argsort(duplicate, axis=1, kind="stable")[:, : tokens.shape[1]]
        return np.take_along_axis(line, order, axis=1), np.take_along_axis(scores, order, axis=1)

    def open(self, request_id: int) -> None:
        self._guesses.open(request_id)

    def commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.request not in self._guesses:
                continue
            guesses = self._guesses[commit.request]
            for node_id, token in zip(commit.retired_ids.tolist(), commit.new_tokens, strict=True):
                if node_id in guesses:
                    guess, bin_index = guesses.pop(node_id)
                    self.trials[bin_index] += 1
                    self.hits[bin_index] += guess == token
        self._guesses.commit(commits)

    def close(self, request_id: int) -> None:
        """Drops the request's guesses; the counts remain."""
        self._guesses.close(request_id)
