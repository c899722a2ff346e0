"""Several models as one source: the first drafts, and each further one judges the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import validated
from specdec.sources.combined import joined_needs, tally
from specdec.types import Candidates, Commit, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class ModelChain(TokenSource):
    """A draft and middle models between it and the target, each at work on its own (PipeSpec).

    A policy starts passes of the model ``level`` by ``Events.start``. Passes of level 0 propose, as
    those of any source; candidates of further levels come with their events, and are the tokens
    that this model has in place of those that a model below it has proposed.
    """

    @validated
    def __init__(self, *, sources: Sequence[TokenSource]) -> None:
        """Wraps sources, which must not be used elsewhere.

        Args:
            sources: one per model, the draft first; ``Background`` gives each a device.

        Raises:
            ValueError: for no sources, or different vocabularies.
        """
        if not sources:
            raise ValueError("source.sources=[] must list at least one source")
        sizes = {s.vocab_size for s in sources if s.vocab_size is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"the models' vocabularies differ in size ({sorted(sizes)}); all need the target's"
                " tokenizer"
            )
        self.vocab_size: int | None = sizes.pop() if sizes else None
        self.needs = joined_needs(s.needs for s in sources)
        self._levels = tuple(sources)
        self._sum = SourceCounters()

    @property
    def levels(self) -> Sequence[TokenSource]:
        return self._levels

    @property
    def counters(self) -> SourceCounters:
        """Sums over the models; ``by_level`` has the passes of each."""
        tally(self._sum, (level.counters for level in self._levels))
        return self._sum

    def open(self, request: RequestState) -> None:
        """Opens the request on every model."""
        for level in self._levels:
            level.open(request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """The draft's candidates."""
        return self._levels[0].expand(state, nodes, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Tells every model; one that runs a pass hears it when the pass has ended."""
        for level in self._levels:
            level.commit(commits, output)

    def close(self, request_id: int) -> None:
        """Closes the request on every model."""
        for level in self._levels:
            level.close(request_id)
