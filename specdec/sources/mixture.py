"""Several sources as one.

Shape letters: W nodes, S sources, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.interfaces import TokenSource
from specdec.sources.combined import joined_needs, tally
from specdec.sources.sampled import sampled_candidates
from specdec.types import (
    BoolArray,
    Candidates,
    Commit,
    FloatArray,
    IntArray,
    Nodes,
    Output,
    SourceCounters,
)

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class MixtureSource:
    """Asks every source and merges their candidates by mixed probability.

    With weights w_i, renormalised at each node over the sources that have an answer, a token has
    probability sum_i w_i p_i, where p_i is 0 for a source that did not propose it (a lower bound,
    since only its best candidates are known). Its origin is the source with the largest w_i p_i.

    Attributes:
        counters: sums over the sources.
    """

    def __init__(
        self,
        *,
        sources: Sequence[TokenSource],
        weights: Sequence[float] | None = None,
        sample: bool = False,
    ) -> None:
        """Wraps sources, which must not be used otherwise.

        Args:
            sources: at least one.
            weights: positive, one per source; equal where None.
            sample: give the exact mixture distribution, with candidates sampled from it; every
                source must then give its whole distribution.

        Raises:
            ValueError: for no sources, weights that do not fit, vocabularies that differ, or a
                source that cannot give its distribution.
        """
        if not sources:
            raise ValueError("a mixture needs at least one source; give source.sources=[...]")
        weights = [1.0] * len(sources) if weights is None else weights
        if len(weights) != len(sources) or min(weights) <= 0.0:
            raise ValueError(
                f"weights={list(weights)} must be positive, one for each of {len(sources)} sources"
            )
        vocab_sizes = {s.vocab_size for s in sources if s.vocab_size is not None}
        if len(vocab_sizes) > 1:
            raise ValueError(
                f"the sources' vocabularies differ in size ({sorted(vocab_sizes)}); all need the"
                " target's tokenizer"
            )
        silent = [type(s).__name__ for s in sources if not getattr(s, "gives_probs", False)]
        if sample and silent:
            raise ValueError(
                f"{', '.join(silent)} cannot give the whole distribution that a rejection verifier"
                " needs; leave it out of the mixture or use verifier=match"
            )
        self.gives_probs = sample
        self.vocab_size: int | None = vocab_sizes.pop() if vocab_sizes else None
        self.needs = joined_needs(s.needs for s in sources)
        self.counters = SourceCounters()
        self._sources = list(sources)
        self._weights = np.asarray(weights, float) / sum(weights)

    def open(self, request: RequestState) -> None:
        """Passed on to every source."""
        for source in self._sources:
            source.open(request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """The ``k`` most probable candidates of the mixture, or ``k`` sampled from it."""
        answers = [source.expand(state, nodes, k) for source in self._sources]
        tally(self.counters, (source.counters for source in self._sources))
        has_answer = np.stack([a.counts > 0 for a in answers], axis=1)  # [W, S]
        weights = np.where(has_answer, self._weights, 0.0)
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        if self.gives_probs:
            return self._sampled(state, nodes, answers, weights, k)
        return _merged(answers, weights, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Passed on to every source."""
        for source in self._sources:
            source.commit(commits, output)

    def close(self, request_id: int) -> None:
        """Passed on to every source."""
        for source in self._sources:
            source.close(request_id)

    def _sampled(
        self,
        state: DecodeState,
        nodes: Nodes,
        answers: Sequence[Candidates],
        weights: FloatArray,
        k: int,
    ) -> Candidates:
        """Candidates from the exact mixture; a node without any answer gets none."""
        shares = [
            w[:, None] * a.probs
            for w, a in zip(weights.T, answers, strict=True)
            if a.probs is not None
        ]
        if not shares:
            return Candidates.empty(len(nodes))
        probs = np.sum(shares, axis=0)
        total = probs.sum(axis=1, keepdims=True)
        uniform = np.full_like(probs, 1.0 / probs.shape[1])
        probs = np.where(total > 0.0, probs / np.where(total > 0.0, total, 1.0), uniform)
        drawn = sampled_candidates(state, nodes, probs, k)
        at = np.arange(len(probs))[:, None]
        origins = np.stack([share[at, drawn.tokens] for share in shares]).argmax(axis=0)
        return Candidates(
            tokens=drawn.tokens,
            logprobs=drawn.logprobs,
            counts=np.where(weights.any(axis=1), drawn.counts, 0),
            probs=probs,
            origins=origins,
        )


def _merged(answers: Sequence[Candidates], weights: FloatArray, k: int) -> Candidates:
    """Candidates of all sources, equal tokens added up, the ``k`` best of each node."""
    tokens = np.concatenate([a.tokens for a in answers], axis=1)  # [W, S * K]
    parts = []
    for i, answer in enumerate(answers):
        valid = np.arange(answer.tokens.shape[1]) < answer.counts[:, None]
        share = weights[:, i, None] * np.exp(np.where(valid, answer.logprobs, -np.inf))
        parts.append(share)
    shares = np.concatenate(parts, axis=1)
    source_of = np.repeat(np.arange(len(answers)), [a.tokens.shape[1] for a in answers])
    same: BoolArray = tokens[:, :, None] == tokens[:, None, :]
    together = np.where(same, shares[:, None, :], 0.0)  # [W, SK, SK]
    total = together.sum(axis=2)
    live = shares > 0.0
    first = (same & live[:, None, :]).argmax(axis=2) == np.arange(tokens.shape[1])
    total[~(first & live)] = 0.0
    origins: IntArray = source_of[together.argmax(axis=2)]
    order = np.argsort(-total, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(total, order, axis=1)
    with np.errstate(divide="ignore"):
        logprobs = np.minimum(np.log(scores), 0.0)
    return Candidates(
        tokens=np.take_along_axis(tokens, order, axis=1),
        logprobs=logprobs,
        counts=(scores > 0.0).sum(axis=1),
        origins=np.take_along_axis(origins, order, axis=1),
    )
