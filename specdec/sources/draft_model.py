"""A draft model as a source, and candidates ranked by the target's own draw (``guess_draw``).

Staged Speculative Decoding, future work 1: under ``match`` the target's next token is the inverse
CDF of its distribution at a keyed draw u. Accepted tokens are the target's own, so using that draw
to rank candidates does not change the output. The draft's CDF differs from the target's, so the
draft's token at u may be wrong.

Shape letters: W nodes, S tokens of positive probability, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

from specdec.clocks import Work
from specdec.device import SupportProbs
from specdec.models.runner import ModelRunner
from specdec.parts.fields import Count, Positive, validated
from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingTransform, counts_of
from specdec.sources.model_source import CachedModelSource, Histories
from specdec.types import Candidates, Commit, FloatArray, IntArray, Needs, NodeMap, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

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


class DraftModelSource(CachedModelSource):
    """Proposes the most probable, or sampled, next tokens of a draft or middle model.

    The model has its own KV cache. Nodes beyond its maximum position get count 0.

    Args:
        runner: runs all layers of the model; or a function from name to runner.
        model: the model's name, by which a latency profile prices its passes.
        sample: sample candidates without replacement from the draft's distribution after the
            target's sampling transform, and return that distribution (for rejection verifiers).
        guess_draw: rank candidates by the draw with which the target will select its token (Staged
            Speculative Decoding, future work 1). Lossless under ``match``.
        guess_spread: with ``guess_draw``: expected error of the draft's CDF at the draw
            (``NearDraw``); None: ``DrawGuesser``.
        prefill_chunk: maximum number of prompt rows per request and pass.
    """

    @validated
    def __init__(
        self,
        *,
        runner: ModelRunner | Callable[[str], ModelRunner],
        model: Literal["draft", "middle"] = "draft",
        sample: bool = False,
        guess_draw: bool = False,
        guess_spread: Positive | None = 0.2,
        prefill_chunk: Count = 512,
    ) -> None:
        if sample and guess_draw:
            raise ValueError(
                "guess_draw=true reads the target's draws, which would bias a rejection verifier;"
                " use verifier=match or guess_draw=false"
            )
        runner = runner(model) if callable(runner) else runner
        super().__init__(
            runner=runner,
            label=runner.name,
            needs=Needs(target_draws=guess_draw),
            vocab_size=runner.vocab_size,
            sample=sample,
            prefill_chunk=prefill_chunk,
            work=Work(model),
        )
        self.model = model
        self.guesser = DrawGuesser() if guess_draw and guess_spread is None else None
        self._near = None
        if guess_draw and guess_spread is not None:
            self._near = NearDraw(spread=guess_spread)

    def open(self, request: RequestState) -> None:
        super().open(request)
        if self.guesser is not None:
            self.guesser.open(request.id)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        super().commit(commits, output)
        if self.guesser is not None:
            self.guesser.commit(commits)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        if self.guesser is not None:
            self.guesser.close(request_id)

    def _propose(
        self,
        state: DecodeState,
        nodes: Nodes,
        logits: Tensor,
        transform: SamplingTransform,
        histories: Histories,
        k: int,
    ) -> Candidates:
        guesses = not transform.params.greedy
        if guesses and self._near is not None:
            draws = target_draws(state, nodes)
            return self._near.candidates(transform, logits, histories, draws, k)
        candidates = super()._propose(state, nodes, logits, transform, histories, k)
        if not guesses or self.guesser is None:
            return candidates
        tokens, logprobs = self.guesser.rank(
            state, nodes, transform, logits, histories, candidates.tokens, candidates.logprobs
        )
        counts = counts_of(transform, logprobs)
        return replace(candidates, tokens=tokens, logprobs=logprobs, counts=counts)
