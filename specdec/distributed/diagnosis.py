"""Why a group of ranks does not go on: which rank was first to fail, and of what."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from specdec.distributed import store_keys
from specdec.distributed.launch import Processes
from specdec.distributed.transport import PeerLost
from specdec.errors import RankFailure, UserError

_WATCH_S = 0.25
_SETTLE_S = 1.0  # the first failure noticed may be the echo of another
_STALE_S = 4 * store_keys.HEARTBEAT_S


class Diagnosis:
    """Watches exits, reports of failures and signs of life."""

    def __init__(self, *, store: dist.Store, size: int, processes: Processes | None) -> None:
        """Watches nothing before ``start``, but can be asked."""
        self._store = store
        self._ranks = range(1, size)
        self._processes = processes
        self._beats: dict[int, tuple[float, int, str]] = {}  # rank -> (seen first, number, doing)
        self._moved = time.monotonic()
        self._began: float | None = None
        self._alarm = False
        self._stopped = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Watches from now on."""
        self._began = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """Watches no longer; waits so long for the thread that did."""
        self._stopped.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(wait_s)

    def alarmed(self) -> bool:
        """Whether a rank is known to have failed or ended."""
        if self._processes is not None and self._processes.ended:
            return True
        return self._alarm

    def expect_progress(self) -> None:
        """Somebody waits from now on."""
        self._moved = max(self._moved, time.monotonic())

    def silent_s(self) -> float:
        """Seconds since any rank was seen to do something else than before."""
        return time.monotonic() - self._moved

    def failure(self, lost: PeerLost | None = None) -> BaseException:
        """The root cause of a failure that has been noticed: waits a little for what else comes in.

        A rank's own error comes before the death of a process, and both before lost connections,
        which are echoes.
        """
        until = time.monotonic() + _SETTLE_S
        while True:
            found = self._own_errors() or self._deaths()
            if found is not None:
                return found
            if time.monotonic() > until:
                return self._lost(lost)
            time.sleep(0.05)

    def hang(self, timeout_s: float) -> RankFailure:
        """Who is to blame for ``timeout_s`` seconds without any progress."""
        stale = self.stale(_STALE_S)
        if stale:
            what = "gives no sign of life (stopped, swapped out, or its machine is gone)"
            return RankFailure(
                rank=min(stale),
                cause=f"it {what}; nothing has moved for executor.timeout_s={timeout_s:g} s",
            )
        doing = {r: text for r, (_, _, text) in self._beats.items()}
        at_work = [r for r, text in doing.items() if "computing" in text] or sorted(doing)
        rank = min(at_work)
        return RankFailure(
            rank=rank,
            cause=f"it is {doing[rank]} and nothing has moved for executor.timeout_s={timeout_s:g}"
            " s; if its work takes that long, raise executor.timeout_s",
        )

    def stale(self, seconds: float) -> list[int]:
        """Ranks without a sign of life for so long; none before ``start``."""
        began, now = self._began, time.monotonic()
        if began is None:
            return []
        return [r for r in self._ranks if now - self._beats.get(r, (began, -1, ""))[0] > seconds]

    def _own_errors(self) -> BaseException | None:
        told = self._told()
        for kind in ("user", "raised"):
            for rank, what in sorted(told.items()):
                if what["kind"] == kind:
                    if kind == "user":
                        return UserError(f"rank {rank}: {what['text']}")
                    return RankFailure(rank=rank, cause=what["text"])
        return None

    def _deaths(self) -> RankFailure | None:
        if self._processes is None:
            return None
        told = self._told()
        for rank, status in sorted(self._processes.ended.items()):
            if rank not in told:  # those with a report end by themselves
                return RankFailure(rank=rank, cause=_cause(status, self._processes.log(rank)))
        return None

    def _lost(self, noticed: PeerLost | None) -> RankFailure:
        told = self._told()
        named = Counter(w["peer"] for w in told.values() if w["kind"] == "lost")
        if noticed is not None:
            named[noticed.peer] += 1
        silent = [rank for rank, _ in named.most_common() if rank and rank not in told]
        if silent:
            return RankFailure(
                rank=silent[0], cause="its connections broke (killed, or its machine is gone)"
            )
        return RankFailure(rank=None, cause="connections between ranks broke")

    def _told(self) -> dict[int, dict[str, Any]]:
        """What ranks have said about their own failures."""
        found = {}
        with suppress(RuntimeError):
            for rank in self._ranks:
                key = store_keys.failed(rank)
                if self._store.check([key]):
                    found[rank] = json.loads(self._store.get(key))
        return found

    def _watch(self) -> None:
        while not self._stopped.wait(_WATCH_S):
            try:
                self._look()
            except RuntimeError:  # the store has gone: so has the job
                self._alarm = not self._stopped.is_set()
                return

    def _look(self) -> None:
        now = time.monotonic()
        for rank in self._ranks:
            if self._store.check([store_keys.failed(rank)]):
                self._alarm = True
            if not self._store.check([store_keys.heartbeat(rank)]):
                continue
            number, doing = json.loads(self._store.get(store_keys.heartbeat(rank)))
            _, last, before = self._beats.get(rank, (0.0, -1, ""))
            if number != last:
                self._beats[rank] = (now, number, doing)
            if doing != before:
                self._moved = now


def _cause(status: int, log: str) -> str:
    tail = f"; the end of its log: {log}" if log else ""
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (out of memory, or by hand)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}{tail}"
    return f"its process ended with status {status}{tail}"
