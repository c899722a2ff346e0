"""Rank 0's end of a group of ranks: sending, answers, failures."""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from specdec.distributed import store_keys
from specdec.distributed.collective import Connections
from specdec.distributed.diagnosis import Diagnosis
from specdec.distributed.launch import Processes
from specdec.distributed.messages import Kind, json_message, message
from specdec.distributed.plan import DraftPlan, SessionPlan
from specdec.distributed.replies import REPLIES, Arrived, Owed, Reply
from specdec.distributed.transport import (
    FOREVER,
    PeerLost,
    Sender,
    Tag,
    WordReceiver,
    control_group,
)
from specdec.errors import RankFailure
from specdec.types import IntArray

_POLL_S = 0.1
_LOAD_POLL_S = 0.02
_LOAD_PATIENCE_S = 120.0  # without any sign of life
_MAX_UNDER_WAY = 1024  # small messages; rank 0 must never wait for a rank that is behind
_GRACE_S = 5.0  # for ranks to end by themselves


class RankGroup:
    """Ranks 1 .. size - 1, as rank 0 sees them.

    Attributes:
        size: ranks, rank 0 included.
        alive: false once the group has been ended.
        connections: tensor-parallel groups that rank 0 is in.
    """

    def __init__(
        self, *, store: dist.Store, size: int, loopback: bool, processes: Processes | None
    ) -> None:
        """Waits for the ranks and connects to them.

        Args:
            store: shared by all ranks.
            size: ranks, this one included.
            loopback: whether all are on this machine.
            processes: those that this process has started; None where ranks were given.

        Raises:
            RankFailure: if one of them ends before it joins.
        """
        self.size = size
        self.alive = True
        self._store = store
        self._processes = processes
        self._sessions = itertools.count(1)
        self._reports = itertools.count()
        self._replies: dict[Owed, queue.SimpleQueue[Arrived | None]] = {
            (kind, rank): queue.SimpleQueue() for kind in REPLIES for rank in range(1, size)
        }
        self._listened: dict[int, threading.Thread] = {}
        self._diagnosis = Diagnosis(store=store, size=size, processes=processes)
        self.wait_for([store_keys.started(rank) for rank in range(1, size)])
        self._group = control_group(store, 0, size, loopback=loopback)
        self.connections = Connections(store=store, rank=0, loopback=loopback)
        self._sender = Sender(self._group, max_under_way=_MAX_UNDER_WAY)
        self._diagnosis.start()

    # ------------------------------------------------------------------ sessions

    def open_session(self, plan: SessionPlan) -> int:
        """Has ranks load their parts; returns the session's number.

        Raises:
            RankFailure: if a rank cannot; a UserError of a rank is raised as it is.
        """
        session = self.announce(plan)
        self.await_ready(session, plan.members)
        for rank in plan.repliers - self._listened.keys():
            listener = threading.Thread(target=self._listen, args=(rank,), daemon=True)
            self._listened[rank] = listener
            listener.start()
        return session

    def announce(self, plan: SessionPlan | DraftPlan) -> int:
        """Tells a session's ranks to load their parts; returns its number without waiting."""
        session = next(self._sessions)
        kind = "draft" if isinstance(plan, DraftPlan) else "stage"
        content = {"kind": kind, "plan": plan.to_json()}
        self.send(json_message(Kind.SETUP, session, content), plan.members)
        return session

    def await_ready(self, session: int, ranks: Iterable[int]) -> None:
        """Waits until ranks have loaded their parts.

        Raises:
            RankFailure: if a rank cannot; a UserError of a rank is raised as it is.
        """
        self.wait_for([store_keys.ready(session, rank) for rank in ranks])

    def close_session(self, session: int) -> None:
        """Has ranks forget a session."""
        if self.alive:
            self.send(message(Kind.RELEASE, session, 0), range(1, self.size))

    def reports(self, session: int, num_ranks: int) -> list[dict[str, Any]]:
        """What each rank has to report (see ``Worker.report``), rank 1 first.

        Raises:
            RankFailure: if one has ended.
        """
        number = next(self._reports)
        self.send(message(Kind.REPORT, session, number), range(1, num_ranks + 1))
        keys = [store_keys.report(session, number, rank) for rank in range(1, num_ranks + 1)]
        self.wait_for(keys)
        found = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return found

    # ------------------------------------------------------------------ messages

    def send(self, words: IntArray, ranks: Iterable[int]) -> None:
        """Sends one message to several ranks; it must not change afterwards.

        Raises:
            RankFailure: if one has gone.
        """
        try:
            for rank in ranks:
                self._sender.send_words(words, rank, Tag.CONTROL)
        except PeerLost as lost:
            raise self.failed(lost) from None

    @property
    def num_bytes(self) -> int:
        """Bytes that rank 0 has sent."""
        return self._sender.num_bytes

    def has_reply(self, owed: Owed) -> bool:
        """Whether ``reply`` would return at once."""
        return not self._replies[owed].empty()

    def reply(self, owed: Owed, session: int, tick: int, timeout_s: float) -> Reply:
        """A rank's reply of a kind in a step; those that nobody has waited for are dropped.

        Raises:
            RankFailure: if a rank has ended, or none has moved for ``timeout_s``.
        """
        waiting = False
        while True:
            try:
                found = self._replies[owed].get(timeout=_POLL_S)
            except queue.Empty:
                if not waiting:
                    self._diagnosis.expect_progress()
                    waiting = True
                self.check()
                if self._diagnosis.silent_s() > timeout_s:
                    raise self._end(self._diagnosis.hang(timeout_s)) from None
                continue
            if found is None:
                raise self.failed()
            if (found.session, found.tick) == (session, tick):
                return found.reply

    def check(self) -> None:
        """Raises the failure of a rank, if there is one.

        Raises:
            RankFailure: see there; or the UserError that a rank raised.
        """
        if self._diagnosis.alarmed():
            raise self._end(self._diagnosis.failure())

    def failed(self, lost: PeerLost | None = None) -> BaseException:
        """Ends the group; the error that says why.

        Args:
            lost: what this process has noticed itself.
        """
        return self._end(self._diagnosis.failure(lost))

    def hung(self, timeout_s: float) -> BaseException:
        """Ends the group, in which nothing has moved for so long; the error that says so."""
        return self._end(self._diagnosis.hang(timeout_s))

    def wait_for(self, keys: list[str]) -> None:
        """Waits until ranks have written all keys (loading may take long).

        Raises:
            RankFailure: if a rank ends first.
        """
        while not self._store.check(keys):
            self.check()
            if stale := self._diagnosis.stale(_LOAD_PATIENCE_S):
                cause = f"it gave no sign of life for {_LOAD_PATIENCE_S:g} s"
                raise self._end(RankFailure(rank=stale[0], cause=cause))
            time.sleep(_LOAD_POLL_S)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Lets the ranks end, and kills those that do not."""
        if not self.alive:
            return
        self.alive = False
        self._diagnosis.stop()
        with suppress(PeerLost):
            for rank in range(1, self.size):
                self._sender.send_words(message(Kind.STOP, 0, 0), rank, Tag.CONTROL)
        if self._processes is not None:
            self._processes.wait(_GRACE_S)
            self._processes.kill()
        self._join()

    def _join(self) -> None:
        """Waits for the threads, which end when their peers have.

        An interpreter that ends under a thread inside gloo or the store aborts the process.
        """
        self._diagnosis.stop(_GRACE_S)
        for listener in self._listened.values():
            listener.join(_GRACE_S)

    def kill(self) -> None:
        """Ends the ranks at once (after a failure, or in the middle of a step)."""
        if not self.alive:
            return
        self.alive = False
        self._diagnosis.stop()
        if self._processes is not None:
            self._processes.kill()
            self._join()

    def _end(self, error: BaseException) -> BaseException:
        self.kill()
        return error

    def _listen(self, source: int) -> None:
        """Thread: takes replies off the wire, so that waiting for them can be interrupted."""

        def receive(rows: torch.Tensor) -> None:
            self._group.recv([rows], source, Tag.REPLY_ROWS).wait(FOREVER)

        try:
            receiver = WordReceiver(self._group, source, Tag.REPLY)
            while True:
                arrived = Arrived.read(receiver.receive(), receive)
                self._replies[arrived.reply.kind, source].put(arrived)
        except RuntimeError:
            for waiting in self._replies.values():
                waiting.put(None)
