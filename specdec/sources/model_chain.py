"""Several models as one source: the first drafts, and each further one judges the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.interfaces import TokenSource
from specdec.parts.fields import validated
from specdec.sources.combined import CombinedSource
from specdec.types import Candidates, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState


class ModelChain(CombinedSource):
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
        super().__init__(sources)

    @property
    def levels(self) -> Sequence[TokenSource]:
        return self._sources

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        return self._sources[0].expand(state, nodes, k)
