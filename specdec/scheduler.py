"""Admission: opens waiting requests on every part, closes finished ones, adds prefill chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from specdec.interfaces import Executor, TokenSource, TreePolicy
from specdec.state import DecodeState, RequestState, batch_of
from specdec.types import Batch, Nodes, PrefillChunk


class FifoScheduler:
    """Admits requests in arrival order, up to ``batch_size`` at a time.

    Attributes:
        num_steps, num_batch_tokens: steps taken and rows sent to the target so far, prefill apart.
    """

    def __init__(
        self,
        *,
        requests: Iterable[RequestState],
        parts: tuple[TreePolicy, TokenSource, Executor],
        batch_size: int = 1,
        prefill_chunk: int = 512,
        on_finish: Callable[[RequestState], None] | None = None,
    ) -> None:
        """Takes the work of a run.

        Args:
            requests: in the order in which they are served; those due later wait for their arrival.
            parts: told of each request by ``open`` and ``close``.
            batch_size: requests decoded at a time.
            prefill_chunk: prompt tokens per request and step.
            on_finish: called with each finished request, after every part has closed it.

        Raises:
            ValueError: for a batch size or chunk below 1.
        """
        if batch_size < 1 or prefill_chunk < 1:
            raise ValueError(
                f"batch_size={batch_size} and prefill_chunk={prefill_chunk} must be at least 1"
            )
        self._waiting = deque(requests)
        self._parts = parts
        self._batch_size = batch_size
        self._prefill_chunk = prefill_chunk
        self._on_finish = on_finish
        self._state: DecodeState | None = None
        self.num_steps = 0
        self.num_batch_tokens = 0

    def admit(self, state: DecodeState) -> bool:
        """Closes finished requests and opens waiting ones; False when no request is left."""
        self._state = state
        for request in [r for r in state.requests.values() if r.finished]:
            self._close(state, request)
        while self._waiting and len(state.requests) < self._batch_size:
            due = self._waiting[0].arrival_s
            if due > state.clock.now():
                if state.requests:
                    break
                state.clock.wait_until(due)
            request = self._waiting.popleft()
            request.admitted_s = state.clock.now()
            state.requests[request.id] = request
            for part in self._parts:
                part.open(request)
        return bool(state.requests)

    def merge(self, nodes: Nodes) -> Batch:
        """The step's batch: due prefill chunks, and the chosen nodes marked as submitted."""
        state = self._state
        assert state is not None, "admit comes before merge"
        state.mark_submitted(nodes)
        batch = batch_of(state, nodes)
        chunks = tuple(
            PrefillChunk(request=r.id, start=start, tokens=r.tokens[start:stop])
            for r in state.requests.values()
            for start, stop in [self._next_chunk(r)]
            if stop > start
        )
        for chunk in chunks:
            state.requests[chunk.request].prefill_sent = chunk.start + len(chunk.tokens)
        self.num_steps += 1
        self.num_batch_tokens += batch.num_nodes
        return replace(batch, prefills=chunks) if chunks else batch

    def _next_chunk(self, request: RequestState) -> tuple[int, int]:
        start = request.prefill_sent
        return start, min(start + self._prefill_chunk, request.num_prefill)

    def _close(self, state: DecodeState, request: RequestState) -> None:
        for part in self._parts:
            part.close(request.id)
        del state.requests[request.id]
        if self._on_finish is not None:
            self._on_finish(request)
