"""Rank 0's side of a group of ranks (processes): sessions, messages, replies, failure detection."""

import itertools
import json
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from specdec.clocks import timed_runs
from specdec.distributed.launch import Processes
from specdec.distributed.messages import (
    ANY_FAILED,
    HEARTBEAT_S,
    REPLIES,
    Kind,
    Message,
    ReplyKey,
    store_key,
)
from specdec.distributed.plan import DraftPlan, SessionPlan
from specdec.distributed.transport import Connections, ControlLink, PeerLost
from specdec.errors import RankFailure, UserError

_POLL_S = 0.1
_LOAD_POLL_S = 0.02
_NEVER_S = float("inf")
_LOAD_TIMEOUT_S = 120.0  # without any heartbeat
_MAX_PENDING = 256  # small messages; rank 0 must never wait for a slow rank
_GRACE_S = 5.0  # for ranks to exit on their own
_OBSERVE_S = 0.5  # between two readings of the store
_SETTLE_S = 1.0  # the first failure noticed may be the consequence of another
_STALE_S = 3 * HEARTBEAT_S


class RankGroup:
    """Rank 0's connections to ranks 1 .. size - 1.

    Methods that send to ranks or wait for them raise ``RankFailure`` when a rank has ended, or the
    ``UserError`` that the rank has raised; ``close`` and ``kill`` raise neither. ``alive`` is False
    after ``close`` or ``kill``. A *session* is one pipeline or draft model that ranks have loaded.
    """

    def __init__(
        self, *, store: dist.Store, size: int, loopback: bool, processes: Processes | None
    ) -> None:
        """Waits for the ranks and connects to them. ``loopback``: whether all ranks are on this
        machine; ``processes``: None if torchrun or Slurm has started the ranks.
        """
        self.size = size
        self.alive = True
        self.num_handles = 0  # of those that use it (``rank_groups.GroupHandle``)
        self._store = store
        self._processes = processes
        self._session_ids = itertools.count(1)
        self._report_ids = itertools.count()
        self._failures = FailureDetector(store=store, size=size, processes=processes)
        self.inbox = Inbox()
        started = [store_key("started", rank) for rank in range(1, size)]
        self._hosts: list[str] = []  # of ranks 1 .. size - 1, if a launcher has started them
        self.wait_for(started)
        if processes is None:
            self._hosts = [store.get(key).decode() for key in started]
        self.connections = self._connect(loopback)
        self._links = {
            rank: ControlLink(self.connections.peer(rank, max_pending=_MAX_PENDING))
            for rank in range(1, size)
        }
        self._failures.start()
        self._captures = False  # whether a session's ranks may run captured passes
        timed_runs.observe(self)

    def _connect(self, loopback: bool) -> Connections:
        """Joins the gloo group of all ranks in a thread, to notice if one ends before it joins."""
        made: list[Connections | RuntimeError] = []

        def join() -> None:
            try:
                made.append(Connections(self._store, 0, self.size, loopback=loopback))
            except RuntimeError as error:
                made.append(error)

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        while not made:
            thread.join(_LOAD_POLL_S)
            self.check()
        if isinstance(made[0], RuntimeError):
            raise self.failed()
        return made[0]

    def open_session(self, plan: SessionPlan) -> int:
        session = self.announce(plan)
        self.await_ready(session, plan.members)
        self.inbox.listen(session, {rank: self._links[rank] for rank in plan.repliers})
        return session

    def announce(self, plan: SessionPlan | DraftPlan) -> int:
        """Sends ``plan`` to its ranks, which load their layers; returns the session id at once."""
        session = next(self._session_ids)
        self._captures |= plan.model.get("graphs", "off") != "off"
        self.send(Message(Kind.SETUP, session, body=plan), plan.members)
        return session

    def await_ready(self, session: int, ranks: Iterable[int]) -> None:
        self.wait_for([store_key("ready", session, rank) for rank in ranks])

    def begin_timed(self) -> None:
        """Makes ranks capture CUDA graphs now, so that they capture none in the timed run."""
        if self.alive and self._captures:
            self._ask(Kind.BEGIN_TIMED, 0, range(1, self.size))

    def end_timed(self) -> None:
        if self.alive and self._captures:
            self.send(Message(Kind.END_TIMED), range(1, self.size))

    def close_session(self, session: int) -> None:
        if self.alive:
            self.send(Message(Kind.RELEASE, session), range(1, self.size))
            self.inbox.forget(session)

    @property
    def pids(self) -> list[int] | None:
        """Process ids of ranks 1, 2, ..; None if torchrun or Slurm has started the ranks."""
        return None if self._processes is None else self._processes.pids

    def reports(self, session: int, ranks: Sequence[int], timeout_s: float) -> list[dict[str, Any]]:
        return self._ask(Kind.REPORT, session, ranks, timeout_s)

    def _ask(
        self, kind: Kind, session: int, ranks: Sequence[int], timeout_s: float = _NEVER_S
    ) -> list[Any]:
        """Sends a request; returns each rank's report, which ranks put into the store as JSON."""
        number = next(self._report_ids)
        self.send(Message(kind, session, number), ranks)
        keys = [store_key("report", session, number, rank) for rank in ranks]
        self.wait_for(keys, timeout_s)
        reports = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return reports

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        packed = message.pack()
        try:
            for rank in ranks:
                self._links[rank].send(packed)
        except PeerLost as lost:
            raise self.failed(lost) from None

    def has_reply(self, key: ReplyKey, session: int) -> bool:
        return self.inbox.has(key, session)

    def reply(self, key: ReplyKey, session: int, tick: int, timeout_s: float) -> Any:
        """Waits for the reply of executor step ``tick``, returns its body, and drops older ones."""
        waiting = False
        while True:
            received = self._take(key, session, _POLL_S)
            if received is None:
                self.check_progress(timeout_s, begins=not waiting)
                waiting = True
            elif received.tick == tick:
                return received.body

    def next_reply(self, key: ReplyKey, session: int) -> tuple[int, Any] | None:
        """Returns (step number, body) of the next reply, or None if it has not arrived yet."""
        received = self._take(key, session, 0)
        return None if received is None else (received.tick, received.body)

    def _take(self, key: ReplyKey, session: int, timeout_s: float) -> Message | None:
        try:
            return self.inbox.take(key, session, timeout_s)
        except PeerLost as lost:
            raise self.failed(lost) from None

    def wait_for_reply(self, keys: Collection[ReplyKey], session: int, timeout_s: float) -> None:
        """Waits until a reply with one of the keys has arrived."""
        waiting = False
        while not self.inbox.wait(keys, session, _POLL_S):
            self.check_progress(timeout_s, begins=not waiting)
            waiting = True

    def check_progress(self, timeout_s: float, *, begins: bool) -> None:
        """Raises if a rank has failed, or if no rank has made progress for ``timeout_s`` seconds;
        ``begins`` restarts that time, for a caller that only now begins to wait.
        """
        if begins:
            self._failures.last_progress = time.monotonic()
        self.check()
        if time.monotonic() - self._failures.last_progress > timeout_s:
            raise self.hung(timeout_s) from None

    def check(self) -> None:
        if self._failures.alarmed():
            raise self.failed()

    def failed(self, lost: PeerLost | None = None) -> BaseException:
        """Kills the group and returns the error that says why; ``lost`` is a broken connection that
        the caller has noticed.
        """
        return self._kill_with(self._failures.failure(lost))

    def hung(self, timeout_s: float) -> BaseException:
        """Kills the group, which has made no progress for ``timeout_s``; returns the error."""
        return self._kill_with(self._failures.hang(timeout_s))

    def wait_for(self, keys: list[str], timeout_s: float = _NEVER_S) -> None:
        begins = True
        while not self._store.check(keys):
            self.check_progress(timeout_s, begins=begins)
            begins = False
            if stale := self._failures.stale(_LOAD_TIMEOUT_S):
                cause = f"it gave no sign of life for {_LOAD_TIMEOUT_S:g} s"
                raise self._kill_with(RankFailure(rank=stale[0], cause=cause))
            time.sleep(_LOAD_POLL_S)

    def close(self) -> None:
        """Stops the ranks, and kills those that do not exit in time."""
        if not self.alive:
            return
        with suppress(PeerLost):
            for link in self._links.values():
                link.send(Message(Kind.STOP).pack())
        if self._processes is None:
            self.inbox.join(_GRACE_S)
        else:
            self._processes.wait(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        if not self.alive:
            return
        self.alive = False
        if self._processes is not None:
            self._processes.kill()
            self.inbox.join(_GRACE_S)

    def _kill_with(self, error: BaseException) -> BaseException:
        self.kill()
        if isinstance(error, RankFailure) and error.rank and self._hosts:
            host = self._hosts[error.rank - 1]
            return RankFailure(rank=error.rank, cause=error.cause, host=host)
        return error


class Inbox:
    """The replies of ranks, in one queue per session, kind and rank. One thread per rank receives
    replies and sets the event ``wakeup`` after each, unless it is None.
    """

    def __init__(self) -> None:
        self.wakeup: threading.Event | None = None
        self._queues: dict[int, dict[ReplyKey, queue.SimpleQueue[Message | PeerLost]]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._arrived = threading.Event()

    def listen(self, session: int, links: Mapping[int, ControlLink]) -> None:
        """Creates the queues of a new session; from now on receives over ``links`` (by rank)."""
        self._queues[session] = {(k, rank): queue.SimpleQueue() for rank in links for k in REPLIES}
        for rank in links.keys() - self._threads.keys():
            thread = threading.Thread(target=self._read, args=(rank, links[rank]), daemon=True)
            self._threads[rank] = thread
            thread.start()

    def forget(self, session: int) -> None:
        """Removes the queues of a session that has been closed."""
        self._queues.pop(session, None)

    def has(self, key: ReplyKey, session: int) -> bool:
        return not self._queues[session][key].empty()

    def take(self, key: ReplyKey, session: int, timeout_s: float) -> Message | None:
        """Waits for a reply; returns None after ``timeout_s``, and raises ``PeerLost`` if a
        connection broke.
        """
        try:
            received = self._queues[session][key].get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(received, PeerLost):
            raise received
        return received

    def wait(self, keys: Collection[ReplyKey], session: int, timeout_s: float) -> bool:
        """Waits for a reply with one of the keys; returns False if none came in ``timeout_s``."""
        self._arrived.clear()  # before the first look, so that none is missed
        if not any(self.has(key, session) for key in keys):
            self._arrived.wait(timeout_s)
        return any(self.has(key, session) for key in keys)

    def join(self, timeout_s: float) -> None:
        """Waits for the receiving threads to end, because an interpreter that exits while a thread
        is inside gloo aborts the process.
        """
        for thread in self._threads.values():
            thread.join(timeout_s)

    def _read(self, rank: int, link: ControlLink) -> None:
        try:
            while True:
                received = Message.unpack(link.receive())
                if (queues := self._queues.get(received.session)) is not None:
                    queues[received.kind, rank].put(received)
                self._wake()
        except PeerLost as error:
            for queues in [*self._queues.values()]:  # every waiting caller raises
                for replies in queues.values():
                    replies.put(error)
            self._wake()

    def _wake(self) -> None:
        self._arrived.set()
        if self.wakeup is not None:
            self.wakeup.set()


class FailureDetector:
    """Watches process exits, error reports and heartbeats of ranks 1 .. size - 1.

    Ranks write error reports and heartbeats into the store, which ``alarmed`` reads at most twice
    per second, so that usual steps cost little.
    """

    def __init__(self, *, store: dist.Store, size: int, processes: Processes | None) -> None:
        self._store = store
        self._ranks = range(1, size)
        self._processes = processes
        # rank -> (time at which the latest beat was first seen, its number, current operation)
        self._beats: dict[int, tuple[float, int, str]] = {}
        self.last_progress = time.monotonic()
        self._observed = 0.0  # when the store was read
        self._alarm = False

    def start(self) -> None:
        """Begins to watch heartbeats; every rank must have sent one before."""
        self._beats = dict.fromkeys(self._ranks, (time.monotonic(), -1, ""))

    def alarmed(self) -> bool:
        """Returns whether a rank has failed or ended; reads the store at most twice per second."""
        if self._alarm or (self._processes is not None and self._processes.ended):
            return True
        now = time.monotonic()
        if self._beats and now >= self._observed + _OBSERVE_S:
            self._observed = now
            try:
                self._observe()
            except RuntimeError:  # the store is gone, and with it the job
                self._alarm = True
        return self._alarm

    def failure(self, lost: PeerLost | None = None) -> BaseException:
        """Waits up to a second for the cause of a failure, and returns the error that names it: an
        error that a rank reports takes precedence over a process that ended, and both take
        precedence over lost connections.
        """
        deadline = time.monotonic() + _SETTLE_S
        while True:
            reports = self._reports()
            told = sorted(reports.items(), key=lambda item: (item[1]["kind"] != "user", item[0]))
            for rank, report in told:
                if report["kind"] == "user":
                    return UserError(f"rank {rank}: {report['text']}")
                if report["kind"] == "raised":
                    return RankFailure(rank=rank, cause=report["text"])
            if self._processes is not None:
                for rank, status in sorted(self._processes.ended.items()):
                    if rank not in reports:  # ranks with a report exit because of it
                        cause = _cause(status, self._processes.log(rank))
                        return RankFailure(rank=rank, cause=cause)
            if time.monotonic() > deadline:
                return _lost_connection(reports, lost)
            time.sleep(0.05)

    def hang(self, timeout_s: float) -> RankFailure:
        """Returns the error for ``timeout_s`` of no progress; it names the rank likely to hang."""
        stale = self.stale(_STALE_S)
        if stale:
            what = "gives no sign of life (stopped, swapped out, or its machine is gone)"
            return RankFailure(
                rank=min(stale),
                cause=f"it {what}; nothing has moved for executor.timeout_s={timeout_s:g} s",
            )
        operations = {r: operation for r, (_, _, operation) in self._beats.items()}
        computing = [r for r, operation in operations.items() if "computing" in operation]
        rank = min(computing or operations)
        return RankFailure(
            rank=rank,
            cause=f"it is {operations[rank]} and nothing has moved for"
            f" executor.timeout_s={timeout_s:g} s; if its work takes that long, raise"
            " executor.timeout_s",
        )

    def stale(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [rank for rank, (seen, _, _) in self._beats.items() if now - seen > seconds]

    def _reports(self) -> dict[int, dict[str, Any]]:
        reports = {}
        with suppress(RuntimeError):
            for rank in self._ranks:
                key = store_key("failed", rank)
                if self._store.check([key]):
                    reports[rank] = json.loads(self._store.get(key))
        return reports

    def _observe(self) -> None:
        if self._store.check([ANY_FAILED]):
            self._alarm = True
        beats = self._store.multi_get([store_key("heartbeat", rank) for rank in self._ranks])
        now = time.monotonic()
        for rank, beat in zip(self._ranks, beats, strict=True):
            number, operation = json.loads(beat)
            _, last_number, last_operation = self._beats[rank]
            if number != last_number:
                self._beats[rank] = (now, number, operation)
            if operation != last_operation:
                self.last_progress = now


def _lost_connection(reports: Mapping[int, Any], lost: PeerLost | None) -> RankFailure:
    lost_peers = Counter(r["peer"] for r in reports.values() if r["kind"] == "lost")
    if lost is not None:
        lost_peers[lost.peer] += 1
    silent = [rank for rank, _ in lost_peers.most_common() if rank and rank not in reports]
    if silent:
        return RankFailure(
            rank=silent[0], cause="its connections broke (killed, or its machine is gone)"
        )
    return RankFailure(rank=None, cause="connections between ranks broke")


def _cause(status: int, log: str) -> str:
    tail = f"; the end of its log: {log}" if log else ""
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (out of memory, or by hand)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}{tail}"
    return f"its process ended with status {status}{tail}"
