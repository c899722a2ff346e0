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
    """A draft model and middle models before the target, which run independently (PipeSpec).

    The draft is first in ``sources``; ``Background`` gives each model a device. A policy starts
    passes of the model ``level`` by ``Events.start``. Passes of level 0 propose candidates like any
    source. The candidates of a further level, which come with the event, are this model's own next
    tokens after tokens of the model below it.
    """

    @validated
    def __init__(self, *, sources: Sequence[TokenSource]) -> None:
        super().__init__(sources)

    @property
    def levels(self) -> Sequence[TokenSource]:
        return self._sources

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        return self._sources[0].expand(state, nodes, k)
