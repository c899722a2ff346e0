"""Candidates near the target's own draw (Staged Speculative Decoding, future work 1).

Under ``match`` the target's next token is the inverse CDF of its distribution at a keyed draw u.
The draft's CDF is not the target's: the draft's token at u is wrong where u is near an edge of its
interval, and a token beyond that edge may be right. So the edges are taken to be off by a random
amount with density exp(-abs(x) / spread) / (2 spread): a token's score is the probability that its
interval, moved by it, contains u, plus a small share of the token's own probability. With a spread
near 0 the first candidate is the draft's token at u (``DrawGuesser``), with a large one the most
probable token. Accepted tokens are the target's own, so the output does not change.

Shape letters: W nodes, S tokens of positive probability, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.device import SupportProbs
from specdec.sampling.transform import SamplingTransform
from specdec.types import Candidates, FloatArray, IntArray

FAR_SHARE = 0.05
"""Share of the scores that is the draft's probability, however far from u the token is."""


class NearDraw:
    """Ranks the draft's tokens by their probability near the target's draw."""

    def __init__(self, *, spread: float) -> None:
        """Sets the error.

        Args:
            spread: average error of the draft's CDF, above 0.
        """
        self._spread = spread

    def candidates(
        self,
        transform: SamplingTransform,
        logits: Tensor,
        histories: Sequence[IntArray] | None,
        uniforms: FloatArray,
        k: int,
    ) -> Candidates:
        """The ``k`` best candidates of each node, or fewer where the filters keep fewer tokens.

        Args:
            transform: the target's sampling transform, not greedy.
            logits: [W, V] of the draft.
            histories: for ``transform``.
            uniforms: float64[W], the target's draws after the nodes.
            k: maximum number of candidates per node.
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
        """Token ids int64[W, S], None for all in order, and float64[W, S] that sum to 1."""
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
