"""A scheduler outside the library: the shortest waiting prompt is admitted first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from specdec.errors import UserError
from specdec.interfaces import Executor, Scheduler, TokenSource, TreePolicy
from specdec.serving import ServingRules
from specdec.state import DecodeState, RequestState, batch_of
from specdec.types import Batch, Nodes, PrefillChunk

Tokens = Annotated[int, Field(ge=0)]  # an alias of the author's own


class ShortestFirst(Scheduler):
    """Admits by length; every second of waiting counts as ``patience`` tokens less."""

    def __init__(
        self,
        *,
        patience: Tokens,
        requests: Iterable[RequestState],
        parts: tuple[TreePolicy, TokenSource, Executor],
        batch_size: int,
        prefill_chunk: int,
        rules: ServingRules,
        on_finish: Callable[[RequestState], None] | None,
    ) -> None:
        """Takes the key of its YAML, and what a run injects.

        Args:
            patience: tokens by which a waiting prompt becomes shorter each second.
            requests, parts, batch_size, prefill_chunk, rules, on_finish: see ``MakeScheduler``.
        """
        if rules != ServingRules():
            raise UserError(f"serving=shortest feeds every request at every step, not by {rules}")
        self._patience = patience
        self._waiting = list(requests)
        self._parts = parts
        self._batch_size, self._chunk = batch_size, prefill_chunk
        self._on_finish = on_finish
        self._state: DecodeState | None = None

    def admit(self, state: DecodeState) -> bool:
        """Closes finished requests, then fills the free places with the shortest prompts."""
        self._state, state.turn = state, None  # None: every open request may be fed
        for request in [r for r in state.requests.values() if r.finished]:
            for part in self._parts:
                part.close(request.id)
            del state.requests[request.id]
            if self._on_finish is not None:
                self._on_finish(request)
        while self._waiting and len(state.requests) < self._batch_size:
            if not state.requests:
                state.clock.wait_until(min(r.arrival_s for r in self._waiting))
            now = state.clock.now()
            arrived = [r for r in self._waiting if r.arrival_s <= now]
            if not arrived:
                break
            request = min(arrived, key=lambda r: self._cost(r, now))
            self._waiting.remove(request)
            request.admitted_s = now
            state.requests[request.id] = request
            for part in self._parts:
                part.open(request)
        return bool(state.requests)

    def merge(self, nodes: Nodes) -> Batch:
        """The chosen nodes, and up to ``prefill_chunk`` prompt tokens over all requests."""
        state = self._state
        assert state is not None, "admit comes before merge"
        state.mark_submitted(nodes)
        chunks, room = [], self._chunk
        for request in state.requests.values():
            start = request.prefill_sent
            stop = min(start + room, request.num_prefill)
            if stop > start and not request.finished:
                tokens = request.tokens[start:stop]
                chunks.append(PrefillChunk(request=request.id, start=start, tokens=tokens))
                request.prefill_sent, room = stop, room - (stop - start)
        state.load.count(state.requests.values())
        return replace(batch_of(state, nodes), prefills=tuple(chunks))

    def _cost(self, request: RequestState, now: float) -> float:
        return request.num_prompt - self._patience * (now - request.arrival_s)
