"""What decoding from Python returns: whole generations, and steps as they are decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.pairs import ModelPair
from specdec.state import RequestState

_INCOMPLETE = "\ufffd"  # decoded from a character whose last bytes are missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of ``generate`` for one prompt.

    Attributes:
        text: the decoded output; empty for pairs without a tokenizer.
        tokens: output tokens.
        origins: per token the index of the source that proposed it; -1 for none.
        finish_reason: eos, stop_string, length or cancelled.
        metrics: of the call, by the names of docs/metrics.md; prompts of one call share them.
    """

    text: str
    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    finish_reason: str
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tokens decided in one step of the loop.

    Attributes:
        tokens: at least one.
        origins: per token the index of the source that proposed it; -1 for none.
        text: decoded text; a character is complete with its last byte's step. Empty for pairs
            without a tokenizer.
        finish_reason: eos, stop_string or length at the last step, else None.
        prompt_id: of the prompt.
    """

    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    text: str
    finish_reason: str | None
    prompt_id: int = 0


OnStep = Callable[[Step], bool | None]
"""Called with each step; returning False cancels the request."""


class Follower:
    """Computes the new tokens and text of a request after each step."""

    def __init__(self, pair: ModelPair) -> None:
        """Takes the pair whose tokenizer makes the text."""
        self._tokenizer = pair.tokenizer
        self._num_tokens = 0
        self._text = ""

    def step(self, request: RequestState) -> Step | None:
        """The new tokens; None if there are none (pipeline filling, prefill)."""
        first, self._num_tokens = self._num_tokens, len(request.output)
        if first == self._num_tokens:
            return None
        return Step(
            tokens=tuple(request.output[first:]),
            origins=tuple(request.output_origins[first:]),
            text=self._new_text(request),
            finish_reason=request.finish_reason,
            prompt_id=request.id,
        )

    def _new_text(self, request: RequestState) -> str:
        if self._tokenizer is None:
            return ""
        text = str(self._tokenizer.decode(request.output))
        if request.finish_reason is None and text.endswith(_INCOMPLETE):
            return ""
        new, self._text = text[len(self._text) :], text
        return new
