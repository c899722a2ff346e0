"""The process of one rank from 1 on: joins the group, serves sessions, ends with rank 0.

Ranks that ``specdec run`` starts come from ``fork server``, those of torchrun and Slurm from ``given``.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from specdec.distributed import store_keys
from specdec.distributed.collective import Connections
from specdec.distributed.draft_follower import DraftSession
from specdec.distributed.launch import NOTE
from specdec.distributed.messages import (
    HEADER_WORDS,
    Kind,
    unpack_ending,
    unpack_entry,
    unpack_json,
)
from specdec.distributed.plan import DraftPlan, SessionPlan
from specdec.distributed.replies import Reply
from specdec.distributed.stage_worker import StageSession, build_session
from specdec.distributed.transport import (
    CPU,
    NUM_TAGS,
    Group,
    MessageReceiver,
    PeerLost,
    RowReceiver,
    Sender,
    Tag,
    control_group,
    data_group,
    send_rows,
    wire_device,
)
from specdec.errors import UserError
from specdec.executors.exits import layers_of
from specdec.executors.stage import Stage
from specdec.pairs import ModelPair, PretrainedPair, build_pair
from specdec.tensor_parallel import Collective
from specdec.types import IntArray

_MAX_PENDING = 16  # hidden states may be large


class _Links:
    """A session's rows and replies over the process groups."""

    def __init__(
        self, *, worker: Worker, session: int, stage: Stage, degree: int, num_ranks: int
    ) -> None:
        self._worker = worker
        self._degree = degree
        self._session = session
        self._tag = session * NUM_TAGS
        layers = layers_of(stage)
        self._is_model = layers is not None
        device, dtype, width = torch.device("cpu"), torch.float32, 1
        if layers is not None:
            runner = layers.runner
            device, dtype, width = runner.device, runner.dtype, runner.hidden_size
        before, after = worker.rank - degree, worker.rank + degree
        to = worker.wire(after, device) if after <= num_ranks else CPU
        _, self._sender, shift = worker.data(to)
        self._wire, self._next = to, after - shift
        self._receiver = None
        if before > 0:
            wire = worker.wire(before, device)
            group, _, shift = worker.data(wire)
            self._receiver = RowReceiver(
                group,
                before - shift,
                self._tag + Tag.HIDDEN,
                width=width,
                dtype=dtype,
                device=wire,
            )

    def send_rows(self, rows: torch.Tensor | None, num_rows: int) -> None:
        """To the next stage; a stage that computes nothing sends as many empty rows."""
        rows = torch.zeros(num_rows, 1) if rows is None else rows.to(self._wire)
        send_rows(self._sender, rows, self._next, self._tag + Tag.HIDDEN)

    def receive_rows(self, num_rows: int) -> torch.Tensor | None:
        """Waits for the rows of the stage before."""
        assert self._receiver is not None, "the first rank is fed by rank 0"
        rows = self._receiver.receive(num_rows)
        return rows if self._is_model else None

    def release_rows(self) -> None:
        """Has the next ones received ahead."""
        if self._receiver is not None:
            self._receiver.release()

    def send_reply(self, tick: int, reply: Reply) -> None:
        """Words; distributions or hidden states, where there are any, in a second message."""
        sender = self._worker.control
        sender.send_message(reply.pack(self._session, tick), 0, Tag.REPLY)
        if reply.rows is not None:
            sender.send(reply.rows, 0, Tag.REPLY_ROWS)


class Worker:
    """A rank's process: models, sessions and connections."""

    def __init__(self, *, store: dist.Store, rank: int, size: int, loopback: bool) -> None:
        """Joins the group.

        Args:
            store: shared by all ranks.
            rank, size: 1 <= rank < size.
            loopback: see ``control_group``.
        """
        self.rank = rank
        self.size = size
        self._store = store
        store.set(store_keys.started(rank), str(os.getpid()))
        self._group = control_group(store, rank, size, loopback=loopback)
        self.control = Sender(self._group, max_pending=_MAX_PENDING)
        self._data: tuple[Group, Sender, int] | None = None
        self._commands = MessageReceiver(self._group, 0, Tag.CONTROL)
        self._pairs: dict[str, ModelPair] = {}
        self._connections = Connections(store=store, rank=rank, loopback=loopback)
        self._sessions: dict[int, StageSession] = {}
        self._drafts: dict[int, DraftSession] = {}
        self._current: StageSession | DraftSession | None = None
        self._doing = ""
        self._on_gpu = False
        threading.Thread(target=self._beat, daemon=True).start()

    def serve(self) -> None:
        """Follows rank 0 until it says stop.

        Raises:
            PeerLost: when another rank has gone.
        """
        with torch.inference_mode():
            while True:
                words = self._commands.receive()
                _, kind, session, tick = words[:HEADER_WORDS].tolist()
                if kind == Kind.STOP:
                    return
                self._follow(Kind(kind), session, tick, words)

    def data(self, device: torch.device) -> tuple[Group, Sender, int]:
        """Group and sender of hidden states, and by how much its numbers are lower than ranks."""
        if device.type == "cpu":
            return self._group, self.control, 0
        if self._data is None:
            group = data_group(self._store, self.rank, self.size)
            self._data = group, Sender(group, max_pending=_MAX_PENDING), 1
        return self._data

    def wire(self, other: int, device: torch.device) -> torch.device:
        """Where rows have to lie that go to, or come from, another rank; see ``wire_device``."""
        pair = sorted((self.rank, other))
        store = dist.PrefixStore(f"edge-{pair[0]}-{pair[1]}", self._store)
        return wire_device(store, self.rank, pair, device)

    def _follow(self, kind: Kind, session: int, tick: int, words: IntArray) -> None:
        if kind is Kind.END:
            self._current = stage = self._sessions[session]
            stage.end(tick, unpack_ending(words))
        elif kind is Kind.BEGIN:
            self._current = stage = self._sessions[session]
            stage.begin(tick, unpack_entry(words))
        elif kind is Kind.DRAFT:
            self._current = draft = self._drafts[session]
            draft.follow(words)
        elif kind is Kind.SETUP:
            self._set_up(session, unpack_json(words))
        elif kind is Kind.REPORT:
            self._store.set(
                store_keys.report(session, tick, self.rank), json.dumps(self.report(session))
            )
        elif kind is Kind.RELEASE:
            ended = self._sessions.pop(session, None) or self._drafts.pop(session, None)
            _note(f"session {session}: over after {ended.rows if ended else 0} rows")

    def _set_up(self, session: int, content: dict[str, Any]) -> None:
        self._doing, began = "loading its layers", time.monotonic()
        if content["kind"] == "draft":
            draft = DraftPlan.from_json(content["plan"])
            self._drafts[session] = DraftSession(
                rank=self.rank, plan=draft, pair=self._pair(draft), join=self._join
            )
            what = "share of the draft"
        else:
            plan = SessionPlan.from_json(content["plan"])
            self._sessions[session] = self._stage(session, plan)
            mine = plan.ranks[self.rank - 1]
            what = f"stage {mine.group}, layers {mine.layers}"
        self._doing = ""
        _note(f"session {session}: {what} ready after {time.monotonic() - began:.1f} s")
        self._store.set(store_keys.ready(session, self.rank), "1")

    def _stage(self, session: int, plan: SessionPlan) -> StageSession:
        return build_session(
            rank=self.rank,
            plan=plan,
            pair=self._pair(plan),
            make_links=lambda stage: _Links(
                worker=self,
                session=session,
                stage=stage,
                degree=plan.degree,
                num_ranks=len(plan.ranks),
            ),
            join=self._join,
        )

    def _join(self, peers: Sequence[int]) -> Collective:
        """The group of ranks that share layers, on this rank's device."""
        index = torch.cuda.current_device() if self._on_gpu else None
        device = torch.device("cpu") if index is None else torch.device("cuda", index)
        return self._connections.join(peers, device)

    def _pair(self, plan: SessionPlan | DraftPlan) -> ModelPair:
        """The plan's models, on this rank's device."""
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        model = dict(plan.model)
        if torch.cuda.is_available() and model.get("device") in ("auto", "cuda"):
            index = int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
            torch.cuda.set_device(index)
            model["device"] = f"cuda:{index}"
            self._on_gpu = True
        key = json.dumps(model, sort_keys=True)
        if key not in self._pairs:
            self._pairs[key] = build_pair(model)
        pair = self._pairs[key]
        if isinstance(pair, PretrainedPair):
            pair.parts_only = True
        return pair

    def report(self, session: int) -> dict[str, object]:
        """The clock's report, rows computed, bytes sent and CPU time used, as plain values."""
        sent = self.control.num_bytes + (self._data[1].num_bytes if self._data else 0)
        used = {"bytes_sent": sent, "cpu_s": time.process_time()}
        return {**self._sessions[session].report(), **used}

    def _beat(self) -> None:
        """Says again and again that the process lives, and what it is at."""
        number = 0
        while True:
            current = self._current
            doing = self._doing or (current.doing if current is not None else "idle")
            number += 1
            with suppress(RuntimeError):
                self._store.set(store_keys.heartbeat(self.rank), json.dumps([number, doing]))
            threading.Event().wait(store_keys.HEARTBEAT_S)


def _note(text: str) -> None:
    """A dated line for the rank's log."""
    now = datetime.now().isoformat(sep=" ", timespec="milliseconds")
    print(f"{NOTE}{now} {text}", flush=True)  # noqa: T201 - standard output is the log


def serve(store: dist.Store, rank: int, size: int, *, loopback: bool) -> int:
    """Runs a rank to its end and says why, if it fails.

    Returns:
        An exit status: 0, or 1 after a failure that the store knows of.
    """
    return guarded(
        lambda: Worker(store=store, rank=rank, size=size, loopback=loopback).serve(), store, rank
    )


def guarded(work: Callable[[], object], store: dist.Store, rank: int) -> int:
    """Runs ``work``; a failure is written to the store for rank 0."""
    try:
        work()
    except BaseException as error:
        kind = "lost" if isinstance(error, PeerLost) else "raised"
        if isinstance(error, UserError):
            kind = "user"
        if kind != "lost":
            traceback.print_exc()
        told = {
            "kind": kind,
            "peer": getattr(error, "peer", None),
            "text": f"{type(error).__name__}: {error}" if kind == "raised" else str(error),
        }
        with suppress(RuntimeError):
            store.set(store_keys.failed(rank), json.dumps(told))
        return 1
    return 0
