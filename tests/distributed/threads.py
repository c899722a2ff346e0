"""Ranks as threads: everything of the distributed pipeline but processes and gloo, and quick."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable
from typing import Any

import torch

from specdec.distributed.codec import HEADER_WORDS, Kind, read_ending, read_entry
from specdec.distributed.group import Answered
from specdec.distributed.plan import SessionPlan
from specdec.distributed.session import StageSession, answer_words, build_session
from specdec.executors.stage import ModelStage, Stage
from specdec.pairs import build_pair
from specdec.types import Answers, IntArray

PATIENCE_S = 120.0


class ThreadGroup:
    """Stands for ``RankGroup``; give it to executors by ``lease.give``."""

    num_bytes = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.alive = True
        self._inboxes = {rank: queue.SimpleQueue[Any]() for rank in range(1, size)}
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._sessions: dict[tuple[int, int], StageSession] = {}
        for rank in range(1, size):
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def open_session(self, plan: SessionPlan) -> int:
        session = next(self._numbers)
        plan = SessionPlan.from_json(plan.to_json())
        pair = build_pair(plan.model)
        edges = [queue.SimpleQueue[Any]() for _ in range(len(plan.ranks) + 1)]
        for rank in range(1, len(plan.ranks) + 1):
            link = _Edges(self._answers, session, edges[rank - 1], edges[rank])
            self._sessions[session, rank] = build_session(
                rank=rank, plan=plan, pair=pair, edges_of=link.of
            )
        return session

    def close_session(self, session: int) -> None:
        """Threads that are at it finish by themselves."""

    def send(self, words: IntArray, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._inboxes[rank].put(words.copy())

    def has_answer(self) -> bool:
        return not self._answers.empty()

    def answer(self, session: int, tick: int, timeout_s: float) -> Answered:
        while True:
            found = self._answers.get(timeout=timeout_s)
            if isinstance(found, BaseException):
                raise found
            if (found.session, found.tick) == (session, tick):
                return found

    def check(self) -> None:
        """Failures come as answers."""

    def reports(self, session: int, num_ranks: int) -> list[dict[str, object]]:
        parts = [self._sessions[session, rank] for rank in range(1, num_ranks + 1)]
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
                while (words := self._inboxes[rank].get()) is not None:
                    _, kind, session, tick = words[:HEADER_WORDS].tolist()
                    mine = self._sessions[session, rank]
                    if kind == Kind.BEGIN:
                        mine.begin(tick, read_entry(words))
                    else:
                        mine.end(tick, read_ending(words))
        except Exception as error:
            self._answers.put(error)


class _Edges:
    """Rows through queues; a receiver checks that it expects as many as were sent."""

    def __init__(self, answers: Any, session: int, before: Any, after: Any) -> None:
        self._answers, self._session = answers, session
        self._before, self._after = before, after
        self._is_model = False

    def of(self, stage: Stage) -> _Edges:
        self._is_model = isinstance(stage, ModelStage)
        return self

    def send_rows(self, rows: torch.Tensor | None, num_rows: int) -> None:
        assert rows is None or len(rows) == num_rows
        self._after.put((num_rows, rows))

    def receive_rows(self, num_rows: int) -> torch.Tensor | None:
        sent, rows = self._before.get(timeout=PATIENCE_S)
        assert sent == num_rows, f"{num_rows} rows expected, {sent} sent: the books disagree"
        return rows

    def release_rows(self) -> None:
        """Queues need no buffers."""

    def send_answers(self, tick: int, answers: tuple[Answers, ...]) -> None:
        words = answer_words(tick, self._session, answers)
        probs = None
        if answers[0].probs is not None:
            probs = torch.cat([torch.from_numpy(a.probs) for a in answers])
        self._answers.put(Answered(self._session, tick, words[4:], probs))
