"""Counters for transformers' ``generate``: passes by hooks, tokens by a streamer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from specdec.state import StopRules


@dataclass(slots=True)
class PassLog:
    """Forward passes of one model.

    Attributes:
        rows: tokens fed, per pass.
        seconds: wall time in the passes, embedding to logits.
    """

    rows: list[int] = field(default_factory=list)
    seconds: float = 0.0
    _started: float = 0.0

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Context manager that counts the model's forward passes by hooks."""
        before = model.register_forward_pre_hook(self._before)
        after = model.register_forward_hook(self._after, with_kwargs=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before(self, model: torch.nn.Module, args: Any) -> None:
        self._started = perf_counter()

    def _after(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.seconds += perf_counter() - self._started
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.rows.append(int(tokens.shape[1]))


class EmissionLog(BaseStreamer):
    """Streamer of ``generate``: one entry per target pass.

    Attributes:
        chunks: emitted tokens per pass.
        times: ``perf_counter`` at each emission.
    """

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate``: first with the prompt, then with each pass's tokens."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(perf_counter())
        self.chunks.append(value.reshape(-1).tolist())

    def end(self) -> None:
        """Called by ``generate`` at the end; does nothing."""


def stop_criterion(stop: StopRules, num_prompt: int) -> Callable[..., torch.Tensor]:
    """Stopping criterion with the rules of ``StopRules``, after ``num_prompt`` prompt tokens.

    It returns bool[1]: whether a token added since the last call ends the request.
    """
    checked = 0

    def criterion(input_ids: torch.Tensor, *_args: Any, **_keys: Any) -> torch.Tensor:
        nonlocal checked
        output = input_ids[0, num_prompt:].tolist()
        new, checked = range(checked + 1, len(output) + 1), len(output)
        done = any(stop.reason(output[:end]) is not None for end in new)
        return torch.tensor([done], device=input_ids.device)

    return criterion
