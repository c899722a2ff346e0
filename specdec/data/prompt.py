"""A prompt, and the Protocol of classes that read prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        id: index in the data set, independent of limit, order and subset; keys its randomness. In
            ``mixed``: 1,000,000 times the set's number plus the index in that set.
        text: the prompt for a base model: the text inside the set's template.
        name: short and unique in the data set ("humaneval/17").
        source: origin of the text ("json/decoder.py:JSONDecoder.decode", "line 3").
        message: the user message for a model with a chat template; empty: ``text``.
    """

    id: int
    text: str
    name: str
    source: str
    message: str = ""


@runtime_checkable
class DataReader(Protocol):
    """Reads the prompts of a data set outside this library (``data=`` with ``_target_``).

    The limit, the sample, the chat template and the lengths (``data.limit``, ``sample_seed``,
    ``chat``, ``max_prompt_tokens``, ``truncation``) are applied afterwards.

    Optional methods (default in parentheses):

    provenance() -> dict (empty): plain JSON facts for ``provenance.json``, such as a SHA-256.
    """

    def prompts(self) -> Iterable[Prompt]:
        """Prompts in the data set's order, with different ids.

        Called once before a run, for the first prompt only, and once in the run. Should raise
        ``UserError`` for a missing file or an unreadable record.
        """
        ...
