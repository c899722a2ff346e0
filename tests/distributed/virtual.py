"""Ranks in one thread, each with a time of its own: the paced schedule without a machine's noise.

Real work and messages take no time here, and sleeping takes exactly as long as it says. So what a
paced run takes is what its clocks plan, to be held against the simulator's time without a margin.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
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
    """The time of every rank, in seconds; the clocks read that of the rank at work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now: defaultdict[int, float] = defaultdict(float)
        self._rank = CONTROLLER
        for module in (wall, metering, running):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(wall, "sleep", self._sleep)

    @property
    def now(self) -> float:
        """Of the rank at work."""
        return self._now[self._rank]

    def wait_for(self, at: float) -> None:
        """The rank at work gets something that was sent at ``at``."""
        self._now[self._rank] = max(self.now, at)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """``rank`` is at work."""
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
        edges: list[deque[Any]] = [deque() for _ in range(len(plan.ranks) + 1)]
        for rank in range(1, len(plan.ranks) + 1):
            link = _Links(self, session, rank, edges[rank - 1], edges[rank])
            with self.times.of(rank):
                self._sessions[session, rank] = build_session(
                    rank=rank, plan=plan, pair=pair, make_links=link.of
                )
        return session

    def close_session(self, session: int) -> None:
        """Nothing to free."""

    def send(self, words: IntArray, ranks: Iterable[int]) -> None:
        sent, (_, kind, session, tick) = self.times.now, words[:HEADER_WORDS].tolist()
        for rank in sorted(ranks):  # rows go to the next rank: that of the lower number is first
            with self.times.of(rank):
                self.times.wait_for(sent)
                mine = self._sessions[session, rank]
                if kind == Kind.BEGIN:
                    mine.begin(tick, unpack_entry(words))
                else:
                    mine.end(tick, unpack_ending(words))

    def answer(self, arrived: ReceivedReply, rank: int) -> None:
        """A rank's reply, sent now."""
        self._replies[arrived.reply.kind, rank].append((self.times.now, arrived))

    def has_reply(self, owed: ReplyKey) -> bool:
        waiting = self._replies[owed]
        return bool(waiting) and waiting[0][0] <= self.times.now

    def reply(self, owed: ReplyKey, session: int, tick: int, timeout_s: float) -> Reply:
        sent, found = self._replies[owed].popleft()
        assert (found.session, found.tick) == (session, tick)
        self.times.wait_for(sent)
        return found.reply

    def check(self) -> None:
        """Failures are raised where they happen."""

    def reports(self, session: int, num_ranks: int) -> list[dict[str, object]]:
        parts = [self._sessions[session, rank] for rank in range(1, num_ranks + 1)]
        return [{**part.report(), "bytes_sent": 0} for part in parts]

    def kill(self) -> None:
        self.alive = False

    close = kill


@contextmanager
def virtual_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGroup]:
    """Every executor made inside uses these ranks."""
    made = VirtualGroup(size, Times(monkeypatch))
    use_group(made)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        use_group(None)


class _Links:
    """Rows with the time at which they were sent."""

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
        words = reply.pack(self._session, tick)
        arrived = ReceivedReply.unpack(words, lambda rows: rows.copy_(reply.rows))
        self._group.answer(arrived, self._rank)
