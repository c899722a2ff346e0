from collections.abc import Iterable, Sequence

from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters, total
from specdec.parts.fields import validated
from specdec.state import DecodeState, RequestState
from specdec.types import Candidates, Commit, Needs, Nodes, Output


class WrappedSource(TokenSource):
    """Base of a source that wraps another one and forwards requests, commits and counters to it."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self.needs, self.vocab_size = source.needs, source.vocab_size
        self.gives_probs = source.gives_probs

    @property
    def counters(self) -> SourceCounters:  # type: ignore[override]
        return self._source.counters

    def open(self, request: RequestState) -> None:
        self._source.open(request)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self._source.commit(commits, output)

    def close(self, request_id: int) -> None:
        self._source.close(request_id)


class CombinedSource(TokenSource):
    """Base of sources that own other sources, which they open, commit and close.

    Attributes:
        counters: sums over the owned sources; ``by_level`` lists their models in source order.
    """

    def __init__(self, sources: Sequence[TokenSource]) -> None:
        if not sources:
            raise ValueError("source.sources=[] must list at least one source")
        sizes = {s.vocab_size for s in sources if s.vocab_size is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"the sources' vocabularies differ in size ({sorted(sizes)}); all need the target's"
                " tokenizer"
            )
        self.vocab_size = sizes.pop() if sizes else None
        self.needs = joined_needs(source.needs for source in sources)
        self._sources = tuple(sources)

    @property
    def counters(self) -> SourceCounters:
        parts = [source.counters for source in self._sources]
        return SourceCounters(
            passes=sum(part.passes for part in parts),
            rows=sum(part.rows for part in parts),
            catch_up_rows=sum(part.catch_up_rows for part in parts),
            by_level=total([part.by_level for part in parts]),
        )

    def open(self, request: RequestState) -> None:
        for source in self._sources:
            source.open(request)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for source in self._sources:
            source.commit(commits, output)

    def close(self, request_id: int) -> None:
        for source in self._sources:
            source.close(request_id)


def joined_needs(needs: Iterable[Needs]) -> Needs:
    parts = list(needs)
    return Needs(
        target_probs=any(n.target_probs for n in parts),
        draft_probs=any(n.draft_probs for n in parts),
        target_draws=any(n.target_draws for n in parts),
        hidden=tuple(sorted({name for n in parts for name in n.hidden})),
        early_hidden=tuple(sorted({name for n in parts for name in n.early_hidden})),
        exits=max((n.exits for n in parts), default=0),
        further_exits=tuple(sorted({layer for n in parts for layer in n.further_exits})),
        real_nodes=any(n.real_nodes for n in parts),
        all_answers=any(n.all_answers for n in parts),
    )


class ModelChain(CombinedSource):
    """A draft model, then middle models that check and correct the one before them (PipeSpec).

    The draft is first in ``sources``. A model's *level* is its index in ``sources``, and
    ``Events.start`` starts a pass of one level. The draft proposes candidates like any source. A
    middle model's pass returns, in ``Event.candidates``, that model's own next token after each
    node. The models run at the same time if each is in a ``Background``, on its own device.
    """

    @validated
    def __init__(self, *, sources: Sequence[TokenSource]) -> None:
        super().__init__(sources)

    @property
    def levels(self) -> Sequence[TokenSource]:
        return self._sources

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        return self._sources[0].expand(state, nodes, k)
