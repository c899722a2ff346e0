from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from specdec.device import on_host
from specdec.interfaces import TokenSource
from specdec.parts.fields import PositiveShare, validated
from specdec.sources.combined import CombinedSource, WrappedSource
from specdec.sources.sampled import sampled_candidates
from specdec.state import DecodeState
from specdec.types import Candidates, FloatArray, Nodes


class MixtureSource(CombinedSource):
    """Calls its sources in order and merges their candidates by mixture probability.

    With weights w_i, renormalised at each node over the sources with candidates, a token has
    probability sum_i w_i p_i, where p_i is 0 for a source that did not propose it (a lower bound:
    only a source's best candidates are known). Its origin is the source with the largest w_i p_i.

    Args:
        sources: at least one, the cheapest first; they must not be used elsewhere.
        weights: positive, one per source. Default: equal.
        confident: minimum probability of a source's best candidate to skip the later sources for
            the node. Default: never skip.
        sample: return the exact mixture distribution with candidates sampled from it; requires that
            every source returns its distribution.

    Attributes:
        members: the sources, each wrapped so that its candidates have its index as origin; for
            policies that choose one source per request.
    """

    @validated
    def __init__(
        self,
        *,
        sources: Sequence[TokenSource],
        weights: Sequence[Annotated[float, Field(gt=0)]] | None = None,
        confident: PositiveShare | None = None,
        sample: bool = False,
    ) -> None:
        super().__init__(sources)
        weights = [1.0] * len(sources) if weights is None else weights
        if len(weights) != len(sources):
            raise ValueError(
                f"weights={list(weights)} must have one entry for each of {len(sources)} sources"
            )
        without = [type(s).__name__ for s in sources if not s.gives_probs]
        if sample and without:
            raise ValueError(
                f"{', '.join(without)} cannot give the whole distribution that a rejection verifier"
                " needs; leave it out of the mixture or use verifier=match"
            )
        if confident is not None and sample:
            raise ValueError(
                f"source.confident={confident} selects sources by the candidates' values, which"
                " would bias a rejection verifier; use verifier=match or source.confident=null"
            )
        self.gives_probs = sample
        self.members: tuple[TokenSource, ...] = tuple(
            _Member(source, number) for number, source in enumerate(sources)
        )
        self._confident_logprob = np.inf if confident is None else float(np.log(confident))
        self._weights = np.asarray(weights, float) / sum(weights)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        proposals: list[Candidates] = []
        remaining = np.ones(len(nodes), np.bool_)
        for source in self._sources:
            candidates = Candidates.empty(len(nodes))
            if remaining.any():
                candidates = source.expand(state, nodes.where(remaining), k).spread(remaining)
            best = candidates.logprobs[:, 0]
            remaining &= ~((candidates.counts > 0) & (best >= self._confident_logprob))
            proposals.append(candidates)
        proposed = np.stack([c.counts > 0 for c in proposals], axis=1)  # [W, S]
        weights = np.where(proposed, self._weights, 0.0)
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        if self.gives_probs:
            return _sampled(state, nodes, proposals, weights, k)
        return _merged(proposals, weights, k)


class _Member(WrappedSource):
    def __init__(self, source: TokenSource, number: int) -> None:
        super().__init__(source)
        self.gives_probs, self._number = False, number

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        candidates = self._source.expand(state, nodes, k)
        origins = np.full(candidates.tokens.shape, self._number)
        return replace(candidates, origins=origins)


def _sampled(
    state: DecodeState, nodes: Nodes, proposals: Sequence[Candidates], weights: FloatArray, k: int
) -> Candidates:
    """Samples candidates from the exact mixture; none for nodes without any proposal."""
    given = [(i, c.probs) for i, c in enumerate(proposals) if c.probs is not None]
    if not given:
        return Candidates.empty(len(nodes))
    shares = [weights[:, i, None] * on_host(probs) for i, probs in given]
    probs = np.sum(shares, axis=0)
    total = probs.sum(axis=1, keepdims=True)
    uniform = np.full_like(probs, 1.0 / probs.shape[1])
    probs = np.where(total > 0.0, probs / np.where(total > 0.0, total, 1.0), uniform)
    drawn = sampled_candidates(state, nodes, probs, k)
    rows = np.arange(len(probs))[:, None]
    largest = np.stack([share[rows, drawn.tokens] for share in shares]).argmax(axis=0)
    return Candidates(
        tokens=drawn.tokens,
        logprobs=drawn.logprobs,
        counts=np.where(weights.any(axis=1), drawn.counts, 0),
        probs=probs,
        origins=np.array([i for i, _ in given])[largest],
    )


def _merged(proposals: Sequence[Candidates], weights: FloatArray, k: int) -> Candidates:
    """Returns the ``k`` most probable tokens per node; a token's probability is sum_i w_i p_i."""
    merged = Candidates.empty(len(weights), k)
    origins = np.zeros(merged.tokens.shape, np.int64)
    for row, row_weights in enumerate(weights):
        scores: dict[int, float] = {}
        largest: dict[int, tuple[float, int]] = {}  # token -> its largest share, minus the source
        for number in np.flatnonzero(row_weights).tolist():
            candidates, num = proposals[number], int(proposals[number].counts[row])
            shares = candidates.logprobs[row, :num] + np.log(row_weights[number])
            for token, share in zip(candidates.tokens[row, :num].tolist(), shares, strict=True):
                scores[token] = np.logaddexp(scores.get(token, -np.inf), share)
                largest[token] = max(largest.get(token, (-np.inf, 0)), (share, -number))
        best = sorted(scores, key=lambda token: (-scores[token], token))[:k]
        merged.tokens[row, : len(best)] = best
        merged.logprobs[row, : len(best)] = [min(scores[token], 0.0) for token in best]
        merged.counts[row] = len(best)
        origins[row, : len(best)] = [-largest[token][1] for token in best]
    return replace(merged, origins=origins)
