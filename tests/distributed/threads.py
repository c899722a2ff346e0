"""Ranks as threads: the distributed pipeline without processes and gloo, for fast tests."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specdec.distributed.messages import HEADER_WORDS, Kind, unpack_ending, unpack_entry
from specdec.distributed.plan import SessionPlan
from specdec.distributed.rank_groups import use_group
from specdec.distributed.replies import REPLIES, ReceivedReply, Reply, ReplyKey
from specdec.distributed.stage_worker import StageSession, build_session
from specdec.executors.exits import layers_of
from specdec.executors.stage import Stage
from specdec.pairs import build_pair
from specdec.types import IntArray

PATIENCE_S = 120.0


class ThreadGroup:
    """Replaces ``RankGroup``; executors use it after ``rank_groups.use_group``."""

    num_bytes = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.alive = True
        self._inboxes = {rank: queue.SimpleQueue[Any]() for rank in range(1, size)}
        self._replies = {
            (kind, rank): queue.SimpleQueue[Any]() for kind in REPLIES for rank in range(1, size)
        }
        self._numbers = itertools.count(1)
        self.sessions: dict[tuple[int, int], StageSession] = {}
        for rank in range(1, size):
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def open_session(self, plan: SessionPlan) -> int:
        session = next(self._numbers)
        plan = SessionPlan.from_json(plan.to_json())
        pair = build_pair(plan.model)
        queues = [queue.SimpleQueue[Any]() for _ in range(len(plan.ranks) + 1)]
        for rank in range(1, len(plan.ranks) + 1):
            links = _Links(self._replies, session, rank, queues[rank - 1], queues[rank])
            self.sessions[session, rank] = build_session(
                rank=rank, plan=plan, pair=pair, make_links=links.of
            )
        return session

    def close_session(self, session: int) -> None:
        """Threads finish their work on their own."""

    def send(self, packed: IntArray, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._inboxes[rank].put(packed.copy())

    def has_reply(self, key: ReplyKey) -> bool:
        return not self._replies[key].empty()

    def reply(self, key: ReplyKey, session: int, tick: int, timeout_s: float) -> Reply:
        while True:
            received = self._replies[key].get(timeout=timeout_s)
            if isinstance(received, BaseException):
                raise received
            if (received.session, received.tick) == (session, tick):
                return received.reply

    def check_progress(self, timeout_s: float, *, begins: bool) -> None:
        self.check()

    def check(self) -> None:
        """Failures are put into the reply queues."""

    def reports(self, session: int, ranks: Sequence[int]) -> list[dict[str, object]]:
        parts = [self.sessions[session, rank] for rank in ranks]
        return [{**part.report(), "bytes_sent": 0} for part in parts]

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.alive = False
        for inbox in self._inboxes.values():
            inbox.put(None)

    def _serve(self, rank: int) -> None:
        try:
            with torch.inference_mode():
                while (packed := self._inboxes[rank].get()) is not None:
                    _, kind, session, tick = packed[:HEADER_WORDS].tolist()
                    stage = self.sessions[session, rank]
                    if kind == Kind.BEGIN:
                        stage.begin(tick, unpack_entry(packed))
                    elif kind == Kind.QUERY:
                        stage.query(tick, packed)
                    else:
                        stage.end(tick, unpack_ending(packed))
        except Exception as error:
            for replies in self._replies.values():
                replies.put(error)


@contextmanager
def thread_ranks(size: int) -> Iterator[ThreadGroup]:
    """Every executor created in this context uses these ranks."""
    group = ThreadGroup(size)
    use_group(group)  # type: ignore[arg-type]
    yield group
    use_group(None)
    group.close()


class _Links:
    """Sends rows through queues and checks that the expected number of rows arrives."""

    def __init__(self, replies: Any, session: int, rank: int, before: Any, after: Any) -> None:
        self._replies, self._session, self._rank = replies, session, rank
        self._before, self._after = before, after
        self._is_model = False

    def of(self, stage: Stage) -> _Links:
        self._is_model = layers_of(stage) is not None
        return self

    def send_rows(self, rows: torch.Tensor | None, num_rows: int) -> None:
        assert rows is None or len(rows) == num_rows
        self._after.put((num_rows, rows))

    def receive_rows(self, num_rows: int) -> torch.Tensor | None:
        sent, rows = self._before.get(timeout=PATIENCE_S)
        assert sent == num_rows, f"{num_rows} rows expected, {sent} sent: in-flight rows disagree"
        return rows

    def release_rows(self) -> None:
        """Queues need no buffers."""

    def send_reply(self, tick: int, reply: Reply) -> None:
        packed = reply.pack(self._session, tick)
        received = ReceivedReply.unpack(packed, lambda rows: rows.copy_(reply.rows))
        self._replies[reply.kind, self._rank].put(received)
