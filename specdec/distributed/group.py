"""Rank 0's connection to a group of ranks: sessions, messages, replies and failures."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from specdec.clocks import timed_runs
from specdec.distributed import store_keys
from specdec.distributed.collective import Connections
from specdec.distributed.failure_detector import FailureDetector
from specdec.distributed.inbox import Inbox
from specdec.distributed.launch import Processes
from specdec.distributed.links import ControlLink, GlooLink, SocketLink
from specdec.distributed.messages import Kind, pack_json, pack_message
from specdec.distributed.plan import DraftPlan, SessionPlan
from specdec.distributed.replies import Reply, ReplyKey
from specdec.distributed.transport import PeerLost, control_group
from specdec.errors import RankFailure
from specdec.types import IntArray

_POLL_S = 0.1
_LOAD_POLL_S = 0.02
_LOAD_TIMEOUT_S = 120.0  # without any heartbeat
_MAX_PENDING = 1024  # small messages; rank 0 must never wait for a slow rank
_SEND_S = 60.0  # for a rank to read what its link's buffer cannot hold
_GRACE_S = 5.0  # for ranks to exit on their own


class RankGroup:
    """Ranks 1 .. size - 1, as seen by rank 0.

    Methods that send to ranks or wait for them raise ``RankFailure`` when a rank has ended, or the
    ``UserError`` that it has raised; ``close`` and ``kill`` do not.

    Attributes:
        alive: False once the group has been closed or killed.
        connections: tensor-parallel groups that rank 0 belongs to.
    """

    def __init__(
        self, *, store: dist.Store, size: int, loopback: bool, processes: Processes | None
    ) -> None:
        """Waits for the ranks and connects to them.

        ``processes`` is None if a launcher has started the ranks; ``loopback`` says whether all of
        them are on this machine.
        """
        self.size = size
        self.alive = True
        self._store = store
        self._processes = processes
        self._session_ids = itertools.count(1)
        self._report_ids = itertools.count()
        self._failures = FailureDetector(store=store, size=size, processes=processes)
        self.wait_for([store_keys.started(rank) for rank in range(1, size)])
        self.connections = Connections(store=store, rank=0, loopback=loopback)
        self._links = self._connect(loopback)
        self._inbox = Inbox(self._links)
        self._failures.start()
        self._captures = False  # whether a session's ranks may run captured passes
        timed_runs.observe(self)

    def _connect(self, loopback: bool) -> dict[int, ControlLink]:
        if self._processes is not None:
            ends = self._processes.sockets.items()
            return {rank: SocketLink(end, rank, timeout_s=_SEND_S) for rank, end in ends}
        group = control_group(self._store, 0, self.size, loopback=loopback)
        return {
            rank: GlooLink(group, rank, max_pending=_MAX_PENDING) for rank in range(1, self.size)
        }

    @property
    def wakeup(self) -> threading.Event | None:
        """An event that is set when a reply arrives, if not None."""
        return self._inbox.wakeup

    @wakeup.setter
    def wakeup(self, event: threading.Event | None) -> None:
        self._inbox.wakeup = event

    def open_session(self, plan: SessionPlan) -> int:
        """Opens a pipeline session, for which ranks load their layers; returns its number."""
        session = self.announce(plan)
        self.await_ready(session, plan.members)
        self._inbox.listen(plan.repliers, awaited=plan.repliers - plan.side_repliers)
        return session

    def announce(self, plan: SessionPlan | DraftPlan) -> int:
        """Tells the plan's ranks to load their parts; returns the session's number at once."""
        session = next(self._session_ids)
        kind = "draft" if isinstance(plan, DraftPlan) else "stage"
        content = {"kind": kind, "plan": plan.to_json()}
        self._captures |= plan.model.get("graphs", "off") != "off"
        self.send(pack_json(Kind.SETUP, session, content), plan.members)
        return session

    def await_ready(self, session: int, ranks: Iterable[int]) -> None:
        """Waits until ranks have loaded their parts."""
        self.wait_for([store_keys.ready(session, rank) for rank in ranks])

    def begin_timed(self) -> None:
        """Makes ranks capture CUDA graphs now, so that they need not during a timed run."""
        if not (self.alive and self._captures):
            return
        number, ranks = next(self._report_ids), range(1, self.size)
        self.send(pack_message(Kind.BEGIN_TIMED, 0, number), ranks)
        keys = [store_keys.captured(number, rank) for rank in ranks]
        self.wait_for(keys)
        for key in keys:
            self._store.delete_key(key)

    def end_timed(self) -> None:
        if self.alive and self._captures:
            self.send(pack_message(Kind.END_TIMED, 0, 0), range(1, self.size))

    def close_session(self, session: int) -> None:
        """Makes ranks free a session's models and caches."""
        if self.alive:
            self.send(pack_message(Kind.RELEASE, session, 0), range(1, self.size))

    @property
    def pids(self) -> list[int] | None:
        """Process ids of the ranks; None if a launcher has started them, perhaps elsewhere."""
        return None if self._processes is None else self._processes.pids

    def reports(self, session: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Requests ``Worker.report`` of ``ranks``, which must have the session."""
        number = next(self._report_ids)
        self.send(pack_message(Kind.REPORT, session, number), ranks)
        keys = [store_keys.report(session, number, rank) for rank in ranks]
        self.wait_for(keys)
        reports = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return reports

    def send(self, packed: IntArray, ranks: Iterable[int]) -> None:
        """Sends one message to several ranks; the array must not change afterwards."""
        try:
            for rank in ranks:
                self._links[rank].send(packed)
        except PeerLost as lost:
            raise self.failed(lost) from None

    @property
    def num_bytes(self) -> int:
        """Bytes that rank 0 has sent, including its share of collectives."""
        sent = sum(link.num_bytes for link in self._links.values())
        return sent + self.connections.num_bytes

    def has_reply(self, key: ReplyKey) -> bool:
        """Returns whether ``reply`` would return at once."""
        try:
            return self._inbox.has(key)
        except PeerLost as lost:
            raise self.failed(lost) from None

    def reply(self, key: ReplyKey, session: int, tick: int, timeout_s: float) -> Reply:
        """Waits for a reply to step ``tick``; earlier replies with the same key are dropped.

        Raises:
            RankFailure: a rank has ended, or none has made progress for ``timeout_s``.
        """
        waiting = False
        while True:
            try:
                received = self._inbox.take(key, _POLL_S)
            except PeerLost as lost:
                raise self.failed(lost) from None
            if received is None:
                self.check_progress(timeout_s, begins=not waiting)
                waiting = True
            elif (received.session, received.tick) == (session, tick):
                return received.reply

    def check_progress(self, timeout_s: float, *, begins: bool) -> None:
        """Raises if a rank has failed, or none has made progress for ``timeout_s`` of a wait.

        ``begins`` says whether the wait begins now.
        """
        if begins:
            self._failures.expect_progress()
        self.check()
        if self._failures.silent_s() > timeout_s:
            raise self.hung(timeout_s) from None

    def check(self) -> None:
        """Raises the failure of a rank, if one has been noticed."""
        if self._failures.alarmed():
            raise self.failed()

    def failed(self, lost: PeerLost | None = None) -> BaseException:
        """Kills the group and returns the error that says why.

        ``lost`` is a broken connection that the caller has noticed.
        """
        return self._kill_with(self._failures.failure(lost))

    def hung(self, timeout_s: float) -> BaseException:
        """Kills the group, which has made no progress for ``timeout_s``; returns the error."""
        return self._kill_with(self._failures.hang(timeout_s))

    def wait_for(self, keys: list[str]) -> None:
        """Waits until ranks have set all store keys; there is no limit while they are alive."""
        while not self._store.check(keys):
            self.check()
            if stale := self._failures.stale(_LOAD_TIMEOUT_S):
                cause = f"it gave no sign of life for {_LOAD_TIMEOUT_S:g} s"
                raise self._kill_with(RankFailure(rank=stale[0], cause=cause))
            time.sleep(_LOAD_POLL_S)

    def close(self) -> None:
        """Stops the ranks, and kills those that do not exit in time."""
        if not self.alive:
            return
        self.alive = False
        with suppress(PeerLost):
            for link in self._links.values():
                link.send(pack_message(Kind.STOP, 0, 0))
        if self._processes is not None:
            self._processes.wait(_GRACE_S)
            self._processes.kill()
        self._join_threads()

    def kill(self) -> None:
        """Kills the ranks at once (after a failure, or in the middle of a step)."""
        if not self.alive:
            return
        self.alive = False
        if self._processes is not None:
            self._processes.kill()
            self._join_threads()

    def _join_threads(self) -> None:
        """Waits for the threads, which end when their peers have ended.

        An interpreter that exits while a thread is inside gloo aborts the process.
        """
        self._inbox.join(_GRACE_S)
        for link in self._links.values():
            link.close()

    def _kill_with(self, error: BaseException) -> BaseException:
        self.kill()
        return error
