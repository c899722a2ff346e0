"""Ranks in one thread, each with a virtual time: the paced schedule without a machine's noise.

Real work and messages take no time here, and sleeping takes exactly its argument. The duration of
a paced run is therefore what its clocks plan, and is compared exactly with the simulator's time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import specdec.clocks.meter as metering
import specdec.clocks.wall as wall
import specdec.models.runner as running
from specdec.clocks import CONTROLLER
from specdec.distributed.messages import HEADER_WORDS, Kind, unpack_ending, unpack_entry
from specdec.distributed.plan import SessionPlan
from specdec.distributed.rank_groups import use_group
from specdec.distributed.replies import ReceivedReply, Reply, ReplyKey
from specdec.distributed.stage_worker import StageSession, build_session
from specdec.executors.exits import layers_of
from specdec.executors.stage import Stage
from specdec.pairs import build_pair
from specdec.types import IntArray


class Times:
    """Virtual time of each rank in seconds; clocks read that of the current rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now: defaultdict[int, float] = defaultdict(float)
        self._rank = CONTROLLER
        for module in (wall, metering, running):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(wall, "sleep", self._sleep)

    @property
    def now(self) -> float:
        """Time of the current rank."""
        return self._now[self._rank]

    def wait_for(self, at: float) -> None:
        """The current rank receives a message that was sent at ``at``."""
        self._now[self._rank] = max(self.now, at)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Makes ``rank`` the current rank."""
        before, self._rank = self._rank, rank
        try:
            yield
        finally:
            self._rank = before

    def _sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self._now[self._rank] += seconds


class VirtualGroup:
    """Stands for ``RankGroup``: a rank does what it is sent at once, on its own time."""

    num_bytes = 0

    def __init__(self, size: int, times: Times) -> None:
        self.size = size
        self.alive = True
        self.times = times
        self._replies: dict[ReplyKey, deque[tuple[float, ReceivedReply]]] = defaultdict(deque)
        self._numbers = itertools.count(1)
        self._sessions: dict[tuple[int, int], StageSession] = {}

    def open_session(self, plan: SessionPlan) -> int:
        session, plan = next(self._numbers), SessionPlan.from_json(plan.to_json())
        pair = build_pair(plan.model)
        queues: list[deque[Any]] = [deque() for _ in range(len(plan.ranks) + 1)]
        for rank in range(1, len(plan.ranks) + 1):
            links = _Links(self, session, rank, queues[rank - 1], queues[rank])
            with self.times.of(rank):
                self._sessions[session, rank] = build_session(
                    rank=rank, plan=plan, pair=pair, make_links=links.of
                )
        return session

    def close_session(self, session: int) -> None:
        """Frees nothing."""

    def send(self, packed: IntArray, ranks: Iterable[int]) -> None:
        sent, (_, kind, session, tick) = self.times.now, packed[:HEADER_WORDS].tolist()
        for rank in sorted(ranks):  # a rank sends rows to the next one, so it runs first
            with self.times.of(rank):
                self.times.wait_for(sent)
                stage = self._sessions[session, rank]
                if kind == Kind.BEGIN:
                    stage.begin(tick, unpack_entry(packed))
                elif kind == Kind.QUERY:
                    stage.query(tick, packed)
                else:
                    stage.end(tick, unpack_ending(packed))

    def put_reply(self, received: ReceivedReply, rank: int) -> None:
        """Stores a rank's reply, sent at the current time."""
        self._replies[received.reply.kind, rank].append((self.times.now, received))

    def has_reply(self, key: ReplyKey) -> bool:
        replies = self._replies[key]
        return bool(replies) and replies[0][0] <= self.times.now

    def reply(self, key: ReplyKey, session: int, tick: int, timeout_s: float) -> Reply:
        sent, received = self._replies[key].popleft()
        assert (received.session, received.tick) == (session, tick)
        self.times.wait_for(sent)
        return received.reply

    def check(self) -> None:
        """Failures are raised by ``send``."""

    def reports(self, session: int, ranks: Sequence[int]) -> list[dict[str, object]]:
        parts = [self._sessions[session, rank] for rank in ranks]
        return [{**part.report(), "bytes_sent": 0} for part in parts]

    def kill(self) -> None:
        self.alive = False

    close = kill


@contextmanager
def virtual_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGroup]:
    """Every executor created in this context uses these ranks."""
    group = VirtualGroup(size, Times(monkeypatch))
    use_group(group)  # type: ignore[arg-type]
    try:
        yield group
    finally:
        use_group(None)


class _Links:
    """Sends rows with the time at which they were sent."""

    def __init__(
        self, group: VirtualGroup, session: int, rank: int, before: deque[Any], after: deque[Any]
    ) -> None:
        self._group, self._session, self._rank = group, session, rank
        self._before, self._after = before, after

    def of(self, stage: Stage) -> _Links:
        assert layers_of(stage) is not None
        return self

    def send_rows(self, rows: torch.Tensor | None, num_rows: int) -> None:
        self._after.append((self._group.times.now, num_rows, rows))

    def receive_rows(self, num_rows: int) -> torch.Tensor | None:
        sent, num_sent, rows = self._before.popleft()
        assert num_sent == num_rows
        self._group.times.wait_for(sent)
        return rows

    def release_rows(self) -> None:
        """No buffers."""

    def send_reply(self, tick: int, reply: Reply) -> None:
        packed = reply.pack(self._session, tick)
        received = ReceivedReply.unpack(packed, lambda rows: rows.copy_(reply.rows))
        self._group.put_reply(received, self._rank)
