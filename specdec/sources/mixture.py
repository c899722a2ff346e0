"""Several sources as one.

Shape letters: W nodes, S sources, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from specdec.device import on_host
from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import PositiveShare, validated
from specdec.sources.combined import joined_needs, tally
from specdec.sources.sampled import sampled_candidates
from specdec.types import Candidates, Commit, FloatArray, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class MixtureSource:
    """Asks its sources in order and merges their candidates by mixed probability.

    A node for which a source is ``confident`` is not asked of the later ones: with the cheap
    sources first, a pass of the draft model is spent only where copying has nothing sure to offer.

    With weights w_i, renormalised at each node over the sources that have an answer, a token has
    probability sum_i w_i p_i, where p_i is 0 for a source that did not propose it (a lower bound,
    since only its best candidates are known). Its origin is the source with the largest w_i p_i.

    Attributes:
        counters: sums over the sources.
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
        """Wraps sources, which must not be used otherwise.

        Args:
            sources: at least one, the cheapest first.
            weights: positive, one per source; equal where None.
            confident: probability of a source's best candidate from which the sources after it are
                not asked about the node; None asks all of them always.
            sample: give the exact mixture distribution, with candidates sampled from it; every
                source must then give its whole distribution.

        Raises:
            ValueError: for no sources, weights that do not fit, a probability out of range,
                vocabularies that differ, or a source that cannot give its distribution.
        """
        if not sources:
            raise ValueError("a mixture needs at least one source; give source.sources=[...]")
        weights = [1.0] * len(sources) if weights is None else weights
        if len(weights) != len(sources):
            raise ValueError(
                f"weights={list(weights)} must be one for each of {len(sources)} sources"
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
        if confident is not None and sample:
            raise ValueError(
                "confident decides by the candidates' values which sources are asked, which would"
                " bias a rejection verifier; use verifier=match or source.confident=null"
            )
        self.gives_probs = sample
        self.vocab_size: int | None = vocab_sizes.pop() if vocab_sizes else None
        self.needs = joined_needs(s.needs for s in sources)
        self.counters = SourceCounters()
        self._sources = list(sources)
        self._sure = np.inf if confident is None else float(np.log(confident))
        self._weights = np.asarray(weights, float) / sum(weights)

    def open(self, request: RequestState) -> None:
        """Passed on to every source."""
        for source in self._sources:
            source.open(request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """The ``k`` most probable candidates of the mixture, or ``k`` sampled from it."""
        answers: list[Candidates] = []
        open_rows = np.ones(len(nodes), np.bool_)
        for source in self._sources:
            if open_rows.all():
                answer = source.expand(state, nodes, k)
            elif open_rows.any():
                answer = source.expand(state, nodes.where(open_rows), k).spread(open_rows)
            else:
                answer = Candidates.empty(len(nodes))
            open_rows &= ~((answer.counts > 0) & (answer.logprobs[:, 0] >= self._sure))
            answers.append(answer)
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
        tally(self.counters, (source.counters for source in self._sources))

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
        given = [(i, a.probs) for i, a in enumerate(answers) if a.probs is not None]
        if not given:
            return Candidates.empty(len(nodes))
        shares = [weights[:, i, None] * on_host(probs) for i, probs in given]
        probs = np.sum(shares, axis=0)
        total = probs.sum(axis=1, keepdims=True)
        uniform = np.full_like(probs, 1.0 / probs.shape[1])
        probs = np.where(total > 0.0, probs / np.where(total > 0.0, total, 1.0), uniform)
        drawn = sampled_candidates(state, nodes, probs, k)
        at = np.arange(len(probs))[:, None]
        largest = np.stack([share[at, drawn.tokens] for share in shares]).argmax(axis=0)
        return Candidates(
            tokens=drawn.tokens,
            logprobs=drawn.logprobs,
            counts=np.where(weights.any(axis=1), drawn.counts, 0),
            probs=probs,
            origins=np.array([i for i, _ in given])[largest],
        )


def _merged(answers: Sequence[Candidates], weights: FloatArray, k: int) -> Candidates:
    """Candidates of all sources, equal tokens added up, the ``k`` best of each node."""
    widths = [int(a.counts.max(initial=0)) for a in answers]
    asked = [i for i, width in enumerate(widths) if width]
    if len(asked) == 1:
        return _alone(answers[asked[0]], asked[0], k)
    if not asked:
        return Candidates.empty(len(weights))
    tokens = np.concatenate([answers[i].tokens[:, : widths[i]] for i in asked], axis=1)  # [W, C]
    parts = []
    for i in asked:
        answer, width = answers[i], widths[i]
        valid = np.arange(width) < answer.counts[:, None]
        logprobs = np.where(valid, answer.logprobs[:, :width], -np.inf)
        parts.append(weights[:, i, None] * np.exp(logprobs))
    shares = np.concatenate(parts, axis=1)
    source_of = np.repeat(asked, [widths[i] for i in asked])
    # Equal tokens stand side by side after a stable sort, the largest share of each first.
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


def _alone(answer: Candidates, origin: int, k: int) -> Candidates:
    """The answer of the only source that had one."""
    tokens, logprobs = answer.tokens[:, :k], answer.logprobs[:, :k]
    counts = np.minimum(answer.counts, tokens.shape[1])
    origins = np.full(tokens.shape, origin)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts, origins=origins)
