"""The process of a rank other than 0: joins the group and serves sessions until rank 0 stops it.

Rank 0 is the process that decodes. A session is a pipeline or a draft model on several ranks.
Ranks are started by the module ``fork_server`` or, under torchrun and Slurm, by ``torchrun``.
"""

import itertools
import json
import os
import resource
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from specdec.clocks.timed_runs import begin_timed_run, end_timed_run
from specdec.distributed.launch import NOTE
from specdec.distributed.messages import ANY_FAILED, HEARTBEAT_S, Kind, Message, store_key
from specdec.distributed.plan import DraftPlan, SessionPlan, own_gpu
from specdec.distributed.shared_draft import DraftSession
from specdec.distributed.stage_worker import (
    FreeStageSession,
    RankSession,
    StageLinks,
    StageSession,
)
from specdec.distributed.transport import CPU, Connections, ControlLink, PeerLost
from specdec.errors import UserError
from specdec.pairs import ModelPair, build_pair
from specdec.tensor_parallel.collective import Collective

_MAX_PENDING = 16


class Worker:
    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        loopback: bool,
        timeout_s: float | None = None,
    ) -> None:
        """Joins the group; blocks until all ranks have joined.

        The process ends when the store does not answer for ``timeout_s`` (None: it never ends by
        itself), which is the only sign that the connection to rank 0's machine is lost.
        """
        self.rank = rank
        self._unanswered = 0  # heartbeat intervals since the store has answered
        self._store = store
        # Before ``started``: rank 0 reads all heartbeats once all ranks have started.
        store.set(store_key("heartbeat", rank), json.dumps([0, "connecting"]))
        store.set(store_key("started", rank), socket.gethostname())
        self.connections = Connections(store, rank, size, loopback=loopback)
        self.link = ControlLink(self.connections.peer(0, max_pending=_MAX_PENDING))
        self._mailbox: Mailbox | None = None  # of ranks that run free
        self._pairs: dict[str, ModelPair] = {}
        self._sessions: dict[int, RankSession] = {}
        self._current: RankSession | None = None
        self._loading = ""
        self._device = CPU
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        if timeout_s is not None:
            threading.Thread(target=self._watch_store, args=(timeout_s,), daemon=True).start()

    def serve(self) -> None:
        with torch.inference_mode():
            while True:
                if self._mailbox is None:
                    message = Message.unpack(self.link.receive())
                else:
                    message = self._mailbox.get()
                if message.kind is Kind.STOP:
                    return
                self._handle(*message)

    def _handle(self, kind: Kind, session: int, tick: int, body: Any) -> None:
        if kind is Kind.SETUP:
            self._set_up(session, body)
        elif kind is Kind.BEGIN_TIMED:
            begin_timed_run()
            self._report(session, tick, None)
        elif kind is Kind.END_TIMED:
            end_timed_run()
        elif kind is Kind.REPORT:
            self._report(session, tick, self.report(session))
        elif kind is Kind.RELEASE:
            closed = self._sessions.pop(session, None)
            _log(f"session {session}: closed after {closed.rows if closed else 0} rows")
        else:
            self._current = self._sessions[session]
            self._current.handle(kind, tick, body)

    def _report(self, session: int, number: int, report: Any) -> None:
        self._store.set(store_key("report", session, number, self.rank), json.dumps(report))

    def _set_up(self, session: int, plan: SessionPlan | DraftPlan) -> None:
        self._loading, start = "loading its layers", time.monotonic()
        pair = self._pair(plan)
        if isinstance(plan, DraftPlan):
            what = "share of the draft"
            self._sessions[session] = DraftSession(
                rank=self.rank, plan=plan, pair=pair, join=self._join
            )
        else:
            part = plan.ranks[self.rank - 1]
            what = f"stage {part.group}, layers {part.layers}"
            make: Callable[..., StageSession] = StageSession
            if not plan.lock_step:
                self._mailbox = self._mailbox or Mailbox(self.link)
                make = partial(FreeStageSession, take=partial(self._mailbox.take, session))
            self._sessions[session] = make(
                rank=self.rank,
                plan=plan,
                pair=pair,
                make_links=partial(
                    StageLinks,
                    connections=self.connections,
                    link=self.link,
                    session=session,
                    neighbours=plan.neighbours(self.rank),
                ),
                join=self._join,
            )
        self._loading = ""
        _log(f"session {session}: {what} ready after {time.monotonic() - start:.1f} s")
        self._store.set(store_key("ready", session, self.rank), "1")

    def _join(self, peers: Sequence[int]) -> Collective:
        return self.connections.join(peers, self._device)

    def _pair(self, plan: SessionPlan | DraftPlan) -> ModelPair:
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        model = dict(plan.model)
        if torch.cuda.is_available() and model.get("device") in ("auto", "cuda"):
            shared = isinstance(plan, SessionPlan) and plan.shared_with_draft
            self._device = own_gpu(self.rank, shared_with_draft=shared)
            torch.cuda.set_device(self._device)
            model["device"] = str(self._device)
        key = json.dumps(model, sort_keys=True)
        if key not in self._pairs:
            self._pairs[key] = build_pair(model).without_target()
        return self._pairs[key]

    def report(self, session: int) -> dict[str, Any]:
        return {
            **self._sessions[session].report(),
            "bytes_sent": self.connections.num_bytes,
            "cpu_s": time.process_time(),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _send_heartbeats(self) -> None:
        for number in itertools.count(1):
            current = self._current
            doing = self._loading or (current.doing if current is not None else "idle")
            with suppress(RuntimeError):
                self._store.set(store_key("heartbeat", self.rank), json.dumps([number, doing]))
                self._store.check([ANY_FAILED])  # ``set`` waits for no answer
                self._unanswered = 0
            threading.Event().wait(HEARTBEAT_S)

    def _watch_store(self, timeout_s: float) -> None:
        """Ends the process when the store has not answered for ``timeout_s``. A thread counts
        intervals instead of reading a clock, so that a process that was stopped can continue.
        """
        while self._unanswered * HEARTBEAT_S <= timeout_s:
            threading.Event().wait(HEARTBEAT_S)
            self._unanswered += 1
        _log(
            f"rank {self.rank} on {socket.gethostname()} ends: rank 0's machine has not answered"
            f" for executor.timeout_s={timeout_s:g} s"
        )
        os._exit(1)


class Mailbox:
    """Receives rank 0's messages in a thread, also while the rank waits for rows of a peer."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._messages: deque[Message | PeerLost] = deque()
        self._arrived = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def get(self) -> Message:
        """Waits for the next message; raises ``PeerLost`` if the connection broke."""
        with self._arrived:
            while not self._messages:
                self._arrived.wait()
            received = self._messages.popleft()
        if isinstance(received, PeerLost):
            raise received
        return received

    def take(self, session: int) -> Message | None:
        """Returns the next message if it has arrived and is a BEGIN or END of ``session``."""
        with self._arrived:
            message = self._messages[0] if self._messages else None
            if (
                isinstance(message, Message)
                and message.session == session
                and message.kind in (Kind.BEGIN, Kind.END)
            ):
                self._messages.popleft()
                return message
        return None

    def _read(self) -> None:
        received: Message | PeerLost
        while True:
            try:
                received = Message.unpack(self._link.receive())
            except PeerLost as lost:
                received = lost
            with self._arrived:
                self._messages.append(received)
                self._arrived.notify()
            if isinstance(received, PeerLost) or received.kind is Kind.STOP:
                return


def _log(text: str) -> None:
    now = datetime.now().isoformat(sep=" ", timespec="milliseconds")
    print(f"{NOTE}{now} {text}", flush=True)  # noqa: T201 - standard output is the log


def serve(
    store: dist.Store, rank: int, size: int, *, loopback: bool, timeout_s: float | None = None
) -> int:
    """Runs a rank (arguments as in ``Worker``) until rank 0 stops it; returns its exit status.

    After a failure the status is 1, and the store has JSON under failed/RANK: ``kind`` ("user": a
    UserError, "lost": the connection to rank ``peer``, "raised": other errors) and ``text``.
    """
    try:
        Worker(store, rank, size, loopback=loopback, timeout_s=timeout_s).serve()
    except BaseException as error:
        kind = "lost" if isinstance(error, PeerLost) else "raised"
        if isinstance(error, UserError):
            kind = "user"
        if kind != "lost":
            traceback.print_exc()
        report = {
            "kind": kind,
            "peer": getattr(error, "peer", None),
            "text": f"{type(error).__name__}: {error}" if kind == "raised" else str(error),
        }
        with suppress(RuntimeError):
            store.set(store_key("failed", rank), json.dumps(report))
            store.set(ANY_FAILED, "1")
        return 1
    return 0
