"""What a source with several exits decides."""

from __future__ import annotations

import pytest

from specdec.sources import MultiExitSource
from specdec.state import DecodeState
from specdec.types import BoolArray, Nodes


def going_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fills with whether each node that is asked at the first exit goes on to the next."""
    found: list[bool] = []
    right = MultiExitSource._prefers_later

    def goes_on(self: MultiExitSource, state: DecodeState, nodes: Nodes, at: int) -> BoolArray:
        mask = right(self, state, nodes, at)
        found.extend(mask.tolist() if at == 0 else [])
        return mask

    monkeypatch.setattr(MultiExitSource, "_prefers_later", goes_on)
    return found
