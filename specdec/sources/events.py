import threading
from collections.abc import Sequence

from specdec.clocks import ClockKind
from specdec.interfaces import Events, Executor, TokenSource
from specdec.state import DecodeState
from specdec.types import Event, EventKind, Nodes, Ticket

_LOOK_EVERY_S = 1e-3  # polling interval if a part cannot wake the loop
_CHECK_EVERY_S = 0.1  # polling interval otherwise, in case a part has failed


class LoopEvents(Events):
    """Implements ``Events`` for one decode loop, and polls its draft passes and its executor."""

    def __init__(self, state: DecodeState, source: TokenSource, executor: Executor) -> None:
        self.running: list[Ticket] = []
        self._state = state
        self._source = source
        self._levels = source.levels
        self._executor = executor
        self._wakeup: threading.Event | None = None  # made for the first wait
        self._look_every_s = _LOOK_EVERY_S

    def start(self, nodes: Nodes, k: int, level: int = 0) -> Ticket:
        with self._state.drafting():
            ticket = self._levels[level].start(self._state, nodes, k)
        ticket.level = level
        self.running.append(ticket)
        return ticket

    def ready(self) -> bool:
        return self._executor.ready()

    def next_draft(self) -> Event:
        assert self.running, "no draft pass runs"
        while (event := self._ended_pass()) is None:
            self._wait_until([ticket.due_s for ticket in self.running])
        return event

    def next(self) -> Event:
        """Waits for the next event, and stores its results in the trees and the source."""
        while (event := self._happened()) is None:
            if not self.running and not self._executor.can_poll:
                return Event(EventKind.TARGET)  # ``collect`` waits for it, and detects failures
            self._wait_until([*(ticket.due_s for ticket in self.running), self._executor.due_s()])
        return event

    def _wait_until(self, due: Sequence[float | None]) -> None:
        """Waits until the earliest time in ``due``; if that is past or unknown, for a wakeup."""
        clock = self._state.clock
        first = min((at for at in due if at is not None), default=0.0)
        if first > clock.now():
            clock.wait_until(first)
        elif clock.kind is ClockKind.SIMULATED:
            raise RuntimeError(f"nothing happened at {first} s, when a part is due")
        else:  # the earliest result is late
            self._wait()

    def _ended_pass(self) -> Event | None:
        """Returns the event of a draft pass that has ended by now, after storing its candidates."""
        for ticket in sorted(self.running, key=lambda ticket: ticket.due_s or 0.0):
            candidates = self._levels[ticket.level].poll(ticket)
            if candidates is not None:
                self.running.remove(ticket)
                if ticket.level:
                    return Event(EventKind.DRAFT, ticket, candidates)
                self._state.set_candidates(ticket.nodes, candidates)
                return Event(EventKind.DRAFT, ticket)
        return None

    def _happened(self) -> Event | None:
        if (ended := self._ended_pass()) is not None:
            return ended
        if (output := self._executor.poll()) is not None:
            self._state.receive(output)
            self._source.commit((), output)
            return Event(EventKind.EARLY)
        return Event(EventKind.TARGET) if self._executor.ready() else None

    def _wait(self) -> None:
        """Blocks until a part wakes the loop or the next poll; the first call returns at once."""
        if self._wakeup is None:
            self._wakeup = threading.Event()
            willing = [source.set_wakeup(self._wakeup) for source in self._levels]
            if self._executor.set_wakeup(self._wakeup) and all(willing):
                self._look_every_s = _CHECK_EVERY_S
            return
        with self._state.meter.waiting():
            self._wakeup.wait(self._look_every_s)
        self._wakeup.clear()
