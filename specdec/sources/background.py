import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from specdec.clocks import Clock, ClockKind, MeasuredClock, Work
from specdec.interfaces import TokenSource, TreePolicy
from specdec.metrics.speedup import SpeedupLaw
from specdec.sources.combined import WrappedSource
from specdec.state import DecodeState, RequestState
from specdec.types import Candidates, Commit, Nodes, Output, Ticket


class Background(WrappedSource):
    """Makes a source asynchronous: its passes run on a separate device, one after another.

    On a simulated or paced clock, which take times from a latency profile, a pass is computed when
    it starts, and its time is added to ``free_rank``, a device number that nothing else uses. On a
    measured clock (wall time) it runs in a thread, over a copy of the trees. ``open``, ``commit``
    and ``close`` take effect after the current pass. Source and executor must share no caches.
    """

    asynchronous = True

    def __init__(self, *, source: TokenSource, free_rank: int) -> None:
        super().__init__(source)
        self.model, self.caveat = source.model, source.caveat
        self.members = source.members
        self._rank = free_rank
        self._wakeup: threading.Event | None = None
        self._results: dict[Ticket, Future[Candidates]] = {}
        self._last: Future[Candidates] | None = None
        self._deferred: list[Callable[[], None]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft")
        self._thread_clock: MeasuredClock | None = None
        self._run_clock: Clock

    @property
    def pass_bytes(self) -> int | None:
        return self._source.pass_bytes

    def speedup_law(self, policy: TreePolicy, latency: int) -> SpeedupLaw | None:
        return self._source.speedup_law(policy, latency)

    def set_wakeup(self, event: threading.Event) -> bool:
        self._wakeup = event
        return True

    def open(self, request: RequestState) -> None:
        self._after_pass(partial(super().open, request))

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        ticket = self.start(state, nodes, k)
        if ticket.due_s is not None:
            state.clock.wait_until(ticket.due_s)
        with state.meter.waiting():
            candidates = self._results.pop(ticket).result()
        self._catch_up()
        return candidates

    def start(self, state: DecodeState, nodes: Nodes, k: int) -> Ticket:
        """Queues a pass, which begins when the passes started earlier have ended."""
        result: Future[Candidates]
        if state.clock.kind is ClockKind.MEASURED:
            ticket, view = Ticket(nodes=nodes), state.copy(nodes)
            self._thread_clock = self._thread_clock or MeasuredClock(rank=self._rank)
            view.clock = self._thread_clock
            calls, self._deferred = self._deferred, []
            result = self._thread.submit(self._pass, calls, view, nodes, k, state.clock)
            result.add_done_callback(self._wake)
        else:
            result, clock = Future(), state.clock
            began = max(clock.now(), clock.ends_s(self._rank) or 0.0)
            with clock.on(self._rank):
                result.set_result(self._source.expand(state, nodes, k))
            ticket = Ticket(nodes=nodes, due_s=clock.ends_s(self._rank))
            if clock.kind is ClockKind.PACED:  # a simulated clock traces every rank's charges
                self._trace(clock, began, (ticket.due_s or began) - began, nodes)
        self._results[ticket] = self._last = result
        self._run_clock = state.clock
        return ticket

    def poll(self, ticket: Ticket) -> Candidates | None:
        result = self._results[ticket]
        planned = ticket.due_s is not None and ticket.due_s > self._run_clock.now()
        if planned or not result.done():
            return None
        del self._results[ticket]
        self._catch_up()
        return result.result()

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self._after_pass(partial(super().commit, commits, output))

    def close(self, request_id: int) -> None:
        self._after_pass(partial(super().close, request_id))

    def _pass(
        self,
        calls: Sequence[Callable[[], None]],
        view: DecodeState,
        nodes: Nodes,
        k: int,
        clock: Clock,
    ) -> Candidates:
        """Runs in the thread: makes the deferred calls, then expands nodes of the copied state."""
        with torch.inference_mode():
            for call in calls:
                call()
            began = clock.now()
            candidates = self._source.expand(view, nodes, k)
        took = clock.now() - began
        self._trace(clock, began, took, nodes, work_s=took)
        return candidates

    def _trace(
        self, clock: Clock, began: float, seconds: float, nodes: Nodes, *, work_s: float = 0.0
    ) -> None:
        if clock.timeline is not None:
            kind = Work.DRAFT.value
            clock.timeline.add(self._rank, kind, began, seconds, len(nodes), work_s)

    def _wake(self, _result: Future[Candidates]) -> None:
        """Runs in the thread when a pass has ended, so that the loop calls ``poll``."""
        if self._wakeup is not None:
            self._wakeup.set()

    def _after_pass(self, call: Callable[[], None]) -> None:
        self._deferred.append(call)
        self._catch_up()

    def _catch_up(self) -> None:
        if self._last is None or self._last.done():
            calls, self._deferred = self._deferred, []
            for call in calls:
                call()
