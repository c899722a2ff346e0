"""The default scheduler: first in, first out."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from specdec.interfaces import Executor, Scheduler, TokenSource, TreePolicy
from specdec.serving.feeding import Turns
from specdec.serving.rules import ServingRules
from specdec.state import DecodeState, RequestState, batch_of
from specdec.types import Batch, Nodes, PrefillChunk


class FifoScheduler(Scheduler):
    """Admits requests in the order of arrival, up to ``batch_size`` at a time.

    A finished request is replaced in the same step (continuous admission). No request overtakes
    another, so a large one that waits for blocks cannot starve. A prompt is prefilled before
    its tree is submitted, the oldest request first.
    """

    def __init__(
        self,
        *,
        requests: Iterable[RequestState],
        parts: tuple[TreePolicy, TokenSource, Executor],
        batch_size: int = 1,
        prefill_chunk: int = 512,
        rules: ServingRules | None = None,
        on_finish: Callable[[RequestState], None] | None = None,
    ) -> None:
        """Queues the requests of a run; UserError if one needs more blocks than the cache has.

        ``parts`` (policy, source, executor) open and close each request; ``prefill_chunk`` is the
        maximum number of prompt tokens per step over all requests; ``rules`` None means that all
        requests share each step, and that caches are not paged.
        """
        if batch_size < 1 or prefill_chunk < 1:
            raise ValueError(
                f"batch_size={batch_size} and prefill_chunk={prefill_chunk} must be at least 1"
            )
        rules = ServingRules() if rules is None else rules
        policy, _, executor = parts
        self._waiting = deque(sorted(requests, key=lambda request: request.arrival_s))
        ids = [request.id for request in self._waiting]
        if len(set(ids)) < len(ids):
            repeated = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(
                f"two requests have the id {repeated}, which keys their draws and their caches:"
                " use different ids"
            )
        self._parts = parts
        self._batch_size = batch_size
        self._prefill_chunk = prefill_chunk
        self._prefill_first = rules.prefill_first
        self._on_finish = on_finish
        self._state: DecodeState | None = None
        self._turns = Turns(feeding=rules.feeding, in_flight=executor.in_flight, policy=policy)
        self.budget = rules.budget(policy, executor.in_flight)
        self._tree_nodes = policy.max_cached_nodes(executor.in_flight) or 0
        # Where answers come in any order, nodes stay cached until their ancestors are answered too.
        # Limiting a request's batches keeps its nodes within ``max_cached_nodes``.
        bounded = self.budget is not None and executor.latency is None
        self._max_batches = executor.in_flight if bounded else None
        self.num_steps = 0
        self.num_batch_tokens = 0
        if self.budget is not None:
            for request in self._waiting:
                self.budget.check(request.id, request.num_prompt, request.stop.max_new_tokens)

    def admit(self, state: DecodeState) -> bool:
        self._state = state
        for request in [r for r in state.requests.values() if r.finished]:
            self._close(state, request)
        while self._waiting and self._place_for_next(state):
            request = self._waiting.popleft()
            if request.finished:  # cancelled before it was admitted
                self._report(request)
                continue
            request.admitted_s = state.clock.now()
            state.requests[request.id] = request
            longest = request.num_prompt + request.stop.max_new_tokens
            request.max_cached = longest + self._tree_nodes
            for part in self._parts:
                part.open(request)
        state.turn = self._turn(state)
        return bool(state.requests)

    def merge(self, nodes: Nodes) -> Batch:
        state = self._state
        assert state is not None, "admit comes before merge"
        state.mark_submitted(nodes)
        batch = batch_of(state, nodes)
        chunks = self._prefill(state)
        self.num_steps += 1
        self.num_batch_tokens += batch.num_nodes
        state.load.count(state.requests.values())
        return replace(batch, prefills=chunks) if chunks else batch

    def _place_for_next(self, state: DecodeState) -> bool:
        request = self._waiting[0]
        if request.finished:
            return True
        if len(state.requests) >= self._batch_size:
            return False
        if request.arrival_s > state.clock.now():
            if state.requests:
                return False
            state.clock.wait_until(request.arrival_s)
        return self.budget is None or self.budget.admit(
            request.id, request.num_prompt, request.stop.max_new_tokens
        )

    def _turn(self, state: DecodeState) -> frozenset[int] | None:
        if self._prefill_first and any(
            r.prefill_sent < r.num_prefill for r in state.requests.values()
        ):
            return frozenset()
        turn = self._turns.take(state)
        if self._max_batches is None:
            return turn
        ids = state.requests.keys() if turn is None else turn
        return frozenset(i for i in ids if self._batches(state.requests[i]) < self._max_batches)

    @staticmethod
    def _batches(request: RequestState) -> int:
        submitted_at = request.tree.submitted_at
        return len(np.unique(submitted_at[submitted_at >= 0]))

    def _prefill(self, state: DecodeState) -> tuple[PrefillChunk, ...]:
        chunks, left = [], self._prefill_chunk
        for request in state.requests.values():
            start = request.prefill_sent
            stop = min(start + left, request.num_prefill)
            if stop > start and not request.finished:
                tokens = request.tokens[start:stop]
                chunks.append(PrefillChunk(request=request.id, start=start, tokens=tokens))
                request.prefill_sent = stop
                left -= stop - start
        return tuple(chunks)

    def _close(self, state: DecodeState, request: RequestState) -> None:
        for part in self._parts:
            part.close(request.id)
        del state.requests[request.id]
        if self.budget is not None:
            self.budget.release(request.id)
        self._report(request)

    def _report(self, request: RequestState) -> None:
        if self._on_finish is not None:
            self._on_finish(request)
