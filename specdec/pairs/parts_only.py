"""A view of a pair that loads layers, not the whole target."""

from __future__ import annotations

from typing import Any, cast

from transformers import PreTrainedModel

from specdec.pairs.huggingface import HuggingFacePair
from specdec.sources.pair import A


class PartsOnly:
    """A view of a pair for a process that does not run the target.

    ``part`` loads the requested layers alone (``lone_part``); everything else is the pair's.
    """

    def __init__(self, pair: HuggingFacePair) -> None:
        """Wraps ``pair``."""
        self._pair = pair

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)

    def part(self, first: int, last: int) -> PreTrainedModel:
        """Layers ``first`` .. ``last`` of the target and no others."""
        return self._pair.lone_part(first, last)

    def artefact(self, kind: type[A], **options: Any) -> A:
        """The artefact, loaded from this view."""
        return cast(Any, kind).from_pair(self, **options)  # type: ignore[no-any-return]
