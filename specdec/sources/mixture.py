from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from specdec.device import on_host
from specdec.interfaces import TokenSource
from specdec.parts.fields import PositiveShare, validated
from specdec.sources.combined import CombinedSource, WrappedSource
from specdec.sources.sampled import sampled_candidates
from specdec.types import Candidates, FloatArray, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState


class MixtureSource(CombinedSource):
    """Calls its sources in order and merges their candidates by mixture probability.

    With weights w_i, renormalised at each node over the sources with candidates, a token has
    probability sum_i w_i p_i, where p_i is 0 for a source that did not propose it (a lower bound,
    since only its best candidates are known). Its origin is the source with the largest w_i p_i.

    Args:
        sources: at least one, the cheapest first; they must not be used elsewhere.
        weights: positive, one per source. Default: equal.
        confident: minimum probability of a source's best candidate to skip the later sources for
            the node. Default: never skip.
        sample: return the exact mixture distribution with candidates sampled from it; requires that
            every source returns its distribution.

    Attributes:
        members: the single sources, for policies that choose one; their candidates have its origin.
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
            if remaining.all():
                candidates = source.expand(state, nodes, k)
            elif remaining.any():
                candidates = source.expand(state, nodes.where(remaining), k).spread(remaining)
            else:
                candidates = Candidates.empty(len(nodes))
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
    """Samples candidates from the exact mixture; count 0 for nodes without any proposal."""
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
    """Returns the ``k`` most probable candidates per node, adding probabilities of equal tokens."""
    widths = [int(c.counts.max(initial=0)) for c in proposals]
    proposing = [i for i, width in enumerate(widths) if width]
    if len(proposing) == 1:
        return _single(proposals[proposing[0]], proposing[0], k)
    if not proposing:
        return Candidates.empty(len(weights))
    tokens = np.concatenate([proposals[i].tokens[:, : widths[i]] for i in proposing], axis=1)
    parts = []
    for i in proposing:
        candidates, width = proposals[i], widths[i]
        valid = np.arange(width) < candidates.counts[:, None]
        logprobs = np.where(valid, candidates.logprobs[:, :width], -np.inf)
        parts.append(weights[:, i, None] * np.exp(logprobs))
    shares = np.concatenate(parts, axis=1)  # [W, sum of the widths], as ``tokens``
    source_of = np.repeat(proposing, [widths[i] for i in proposing])
    # The sort makes equal tokens adjacent, the largest share of each first.
    order = np.lexsort((-shares, tokens), axis=1)
    tokens = np.take_along_axis(tokens, order, axis=1)
    shares = np.take_along_axis(shares, order, axis=1)
    first = np.ones(tokens.shape, np.bool_)
    first[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
    total = np.add.reduceat(shares.ravel(), np.flatnonzero(first))
    sums = np.zeros(tokens.shape)
    sums[first] = total
    best = np.lexsort((tokens, -sums), axis=1)[:, :k]
    scores = np.take_along_axis(sums, best, axis=1)
    with np.errstate(divide="ignore"):
        logprobs = np.minimum(np.log(scores), 0.0)
    return Candidates(
        tokens=np.take_along_axis(tokens, best, axis=1),
        logprobs=logprobs,
        counts=(scores > 0.0).sum(axis=1),
        origins=np.take_along_axis(source_of[order], best, axis=1),
    )


def _single(candidates: Candidates, origin: int, k: int) -> Candidates:
    tokens, logprobs = candidates.tokens[:, :k], candidates.logprobs[:, :k]
    counts = np.minimum(candidates.counts, tokens.shape[1])
    origins = np.full(tokens.shape, origin)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts, origins=origins)
