"""Ranks within this process, without gloo: as threads, or one by one, each with a virtual time.

Threads make tests of the distributed pipeline fast. With virtual times real work and messages take
no time, and sleeping takes exactly its argument: the duration of a paced run is what its clocks
plan, and is compared exactly with the simulator's time.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec.clocks.meter as metering
import specdec.clocks.wall as wall
from specdec.clocks import CONTROLLER
from specdec.distributed.messages import REPLIES, Kind, Message, ReplyKey
from specdec.distributed.plan import SessionPlan
from specdec.distributed.rank_groups import use_group
from specdec.distributed.stage_worker import FreeStageSession, StageSession
from specdec.executors.stage import Stage
from tests.matrix.record_tokens import pair_of

PATIENCE_S = 120.0


class _Group:
    """Replaces ``RankGroup`` after ``rank_groups.use_group``."""

    pids = None
    connections = SimpleNamespace(num_bytes=0)
    inbox = SimpleNamespace(wakeup=None)

    def __init__(self, size: int) -> None:
        self.size = size
        self.alive = True
        self._numbers = itertools.count(1)
        self.sessions: dict[tuple[int, int], StageSession] = {}

    @property
    def now(self) -> float:
        return 0.0

    def wait_for(self, at: float) -> None:
        """The current rank receives a message that was sent at ``at``."""

    def of(self, rank: int) -> AbstractContextManager[None]:
        return nullcontext()

    def put_reply(self, received: Message, rank: int) -> None:
        raise NotImplementedError

    def open_session(self, plan: SessionPlan) -> int:
        session = next(self._numbers)
        pair = pair_of(json.dumps(plan.model))
        ranks = range(1, len(plan.ranks) + 1)
        queues = [queue.SimpleQueue[Any]() for _ in range(len(plan.ranks) + 1)]
        for rank in ranks:
            links = _Links(self, session, rank, queues[rank - 1], queues[rank])
            with self.of(rank):
                make: Callable[..., StageSession] = StageSession
                if not plan.lock_step:
                    make = partial(FreeStageSession, take=lambda: None)
                self.sessions[session, rank] = make(
                    rank=rank, plan=plan, pair=pair, make_links=links.of
                )
        return session

    def close_session(self, session: int) -> None:
        """Frees nothing; threads finish their work on their own."""

    def perform(self, message: Message, rank: int) -> None:
        """A rank does what a message says."""
        kind, session, tick, body = Message.unpack(message.pack())
        self.sessions[session, rank].handle(kind, tick, body)

    def check_progress(self, timeout_s: float, *, begins: bool) -> None:
        """Failures are raised by ``send`` or ``reply``."""

    def check(self) -> None:
        """Failures are raised by ``send`` or ``reply``."""

    def reports(self, session: int, ranks: Sequence[int], _: float) -> list[dict[str, object]]:
        parts = [self.sessions[session, rank] for rank in ranks]
        return [{**part.report(), "bytes_sent": 0} for part in parts]

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.alive = False


class _Links:
    """Sends rows through queues and checks that the expected number of rows arrives."""

    def __init__(self, group: _Group, session: int, rank: int, before: Any, after: Any) -> None:
        self._group, self._session, self._rank = group, session, rank
        self._before, self._after = before, after

    def of(self, stage: Stage) -> _Links:
        return self

    def send_rows(self, rows: torch.Tensor | None, num_rows: int) -> None:
        assert rows is None or len(rows) == num_rows
        self._after.put((self._group.now, num_rows, rows))

    def receive_rows(self, num_rows: int) -> torch.Tensor | None:
        at, num_sent, rows = self._before.get(timeout=PATIENCE_S)
        assert num_sent == num_rows, f"{num_rows} rows expected, {num_sent} sent"
        self._group.wait_for(at)
        return rows

    def release_rows(self) -> None:
        """Queues need no buffers."""

    def reply(self, kind: Kind, tick: int, body: Any) -> None:
        sent = Message(kind, self._session, tick, body)
        self._group.put_reply(Message.unpack(sent.pack()), self._rank)


class ThreadGroup(_Group):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        ranks = range(1, size)
        self._inboxes = {rank: queue.SimpleQueue[Any]() for rank in ranks}
        self._replies = {(k, r): queue.SimpleQueue[Any]() for k in REPLIES for r in ranks}
        for rank in ranks:
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._inboxes[rank].put(message)

    def put_reply(self, received: Message, rank: int) -> None:
        self._replies[received.kind, rank].put(received)

    def has_reply(self, key: ReplyKey, session: int) -> bool:
        return not self._replies[key].empty()

    def next_reply(self, key: ReplyKey, session: int) -> tuple[int, Any] | None:
        while self.has_reply(key, session):
            received = self._replies[key].get()
            if isinstance(received, BaseException):
                raise received
            if received.session == session:
                return received.tick, received.body
        return None

    def wait_for_reply(self, keys: Iterable[ReplyKey], session: int, timeout_s: float) -> None:
        while not any(self.has_reply(key, session) for key in keys):
            time.sleep(1e-4)

    def reply(self, key: ReplyKey, session: int, tick: int, timeout_s: float) -> Any:
        while True:
            received = self._replies[key].get(timeout=timeout_s)
            if isinstance(received, BaseException):
                raise received
            if (received.session, received.tick) == (session, tick):
                return received.body

    def close(self) -> None:
        super().close()
        for inbox in self._inboxes.values():
            inbox.put(None)

    def _serve(self, rank: int) -> None:
        try:
            with torch.inference_mode():
                while (message := self._inboxes[rank].get()) is not None:
                    self.perform(message, rank)
        except Exception as error:
            for replies in self._replies.values():
                replies.put(error)


class VirtualGroup(_Group):
    """A rank does what it is sent at once, on its own time, which the clocks read."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(size)
        self._now: defaultdict[int, float] = defaultdict(float)
        self._rank = CONTROLLER
        self._replies: dict[ReplyKey, deque[tuple[float, Message]]] = defaultdict(deque)
        for module in (wall, metering):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(wall, "sleep", self._sleep)

    @property
    def now(self) -> float:
        return self._now[self._rank]

    def wait_for(self, at: float) -> None:
        self._now[self._rank] = max(self.now, at)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        before, self._rank = self._rank, rank
        try:
            yield
        finally:
            self._rank = before

    def _sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self._now[self._rank] += seconds

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        sent = self.now
        for rank in sorted(ranks):  # a rank sends rows to the next one, so it runs first
            with self.of(rank):
                self.wait_for(sent)
                self.perform(message, rank)

    def put_reply(self, received: Message, rank: int) -> None:
        self._replies[received.kind, rank].append((self.now, received))

    def has_reply(self, key: ReplyKey, session: int) -> bool:
        replies = self._replies[key]
        return bool(replies) and replies[0][0] <= self.now

    def next_reply(self, key: ReplyKey, session: int) -> tuple[int, Any] | None:
        if not self.has_reply(key, session):
            return None
        received = self._replies[key].popleft()[1]
        return received.tick, received.body

    def wait_for_reply(self, keys: Iterable[ReplyKey], session: int, timeout_s: float) -> None:
        self.wait_for(min(self._replies[key][0][0] for key in keys if self._replies[key]))

    def reply(self, key: ReplyKey, session: int, tick: int, timeout_s: float) -> Any:
        sent, received = self._replies[key].popleft()
        assert (received.session, received.tick) == (session, tick)
        self.wait_for(sent)
        return received.body


@contextmanager
def _used(group: Any) -> Iterator[Any]:
    use_group(group)
    try:
        yield group
    finally:
        use_group(None)
        group.close()


def thread_ranks(size: int) -> AbstractContextManager[ThreadGroup]:
    """Every executor created in this context uses threads as ranks."""
    return _used(ThreadGroup(size))


def virtual_ranks(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> AbstractContextManager[VirtualGroup]:
    """Every executor created in this context uses ranks with virtual times."""
    return _used(VirtualGroup(size, monkeypatch))
