"""Finds which rank of a group failed first, and why."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from specdec.distributed import store_keys
from specdec.distributed.launch import Processes
from specdec.distributed.transport import PeerLost
from specdec.errors import RankFailure, UserError

_OBSERVE_S = 0.5  # between two readings of the store
_SETTLE_S = 1.0  # the first failure noticed may be the consequence of another
_STALE_S = 3 * store_keys.HEARTBEAT_S


class FailureDetector:
    """Watches process exits, error reports and heartbeats of ranks 1 .. size - 1.

    Reports and heartbeats are in the store, which rank 0 reads (``alarmed``) only after it has
    waited for a while, so that steps of the usual duration cost nothing.
    """

    def __init__(self, *, store: dist.Store, size: int, processes: Processes | None) -> None:
        """``size`` includes rank 0; ``processes`` is None if a launcher has started the ranks."""
        self._store = store
        self._ranks = range(1, size)
        self._processes = processes
        # rank -> (time at which the latest beat was first seen, its number, current operation)
        self._beats: dict[int, tuple[float, int, str]] = {}
        self._beating: list[int] = []  # ranks that have sent a heartbeat
        self._last_progress = time.monotonic()
        self._started: float | None = None
        self._observed = 0.0  # when the store was read
        self._alarm = False

    def start(self) -> None:
        """Starts watching: ranks send heartbeats from now on."""
        self._started = time.monotonic()

    def alarmed(self) -> bool:
        """Returns whether a rank has failed or ended; reads the store at most twice per second."""
        if self._alarm or (self._processes is not None and self._processes.ended):
            return True
        now = time.monotonic()
        if self._started is not None and now >= self._observed + _OBSERVE_S:
            self._observed = now
            try:
                self._observe()
            except RuntimeError:  # the store is gone, and with it the job
                self._alarm = True
        return self._alarm

    def expect_progress(self) -> None:
        """Restarts the count of ``silent_s``, because rank 0 starts to wait now."""
        self._last_progress = max(self._last_progress, time.monotonic())

    def silent_s(self) -> float:
        """Returns the seconds since any rank last changed its current operation."""
        return time.monotonic() - self._last_progress

    def failure(self, lost: PeerLost | None = None) -> BaseException:
        """Returns the root cause of a failure that has been noticed.

        Waits up to a second for further evidence: a rank's own error takes precedence over a
        process exit, and both over lost connections, which are consequences.
        """
        deadline = time.monotonic() + _SETTLE_S
        while True:
            error = self._reported_error() or self._process_exit()
            if error is not None:
                return error
            if time.monotonic() > deadline:
                return self._lost_connection(lost)
            time.sleep(0.05)

    def hang(self, timeout_s: float) -> RankFailure:
        """Returns the error for ``timeout_s`` without progress, which names the rank to blame."""
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
        """Returns the ranks without a heartbeat for ``seconds``; none before ``start``."""
        start, now = self._started, time.monotonic()
        if start is None:
            return []
        return [r for r in self._ranks if now - self._beats.get(r, (start, -1, ""))[0] > seconds]

    def _reported_error(self) -> BaseException | None:
        reports = sorted(self._reports().items())
        for rank, report in reports:
            if report["kind"] == "user":
                return UserError(f"rank {rank}: {report['text']}")
        for rank, report in reports:
            if report["kind"] == "raised":
                return RankFailure(rank=rank, cause=report["text"])
        return None

    def _process_exit(self) -> RankFailure | None:
        if self._processes is None:
            return None
        reports = self._reports()
        for rank, status in sorted(self._processes.ended.items()):
            if rank not in reports:  # ranks with a report exit because of it
                return RankFailure(rank=rank, cause=_cause(status, self._processes.log(rank)))
        return None

    def _lost_connection(self, lost: PeerLost | None) -> RankFailure:
        reports = self._reports()
        lost_peers = Counter(r["peer"] for r in reports.values() if r["kind"] == "lost")
        if lost is not None:
            lost_peers[lost.peer] += 1
        silent = [rank for rank, _ in lost_peers.most_common() if rank and rank not in reports]
        if silent:
            return RankFailure(
                rank=silent[0], cause="its connections broke (killed, or its machine is gone)"
            )
        return RankFailure(rank=None, cause="connections between ranks broke")

    def _reports(self) -> dict[int, dict[str, Any]]:
        """Returns rank -> the failure that it has written to the store (``worker.serve``)."""
        reports = {}
        with suppress(RuntimeError):
            for rank in self._ranks:
                key = store_keys.failed(rank)
                if self._store.check([key]):
                    reports[rank] = json.loads(self._store.get(key))
        return reports

    def _observe(self) -> None:
        """Reads all ranks' keys with few messages to the store."""
        if self._store.check([store_keys.ANY_FAILED]):
            self._alarm = True
        for rank in self._ranks:
            if rank not in self._beating and self._store.check([store_keys.heartbeat(rank)]):
                self._beating.append(rank)
        if not self._beating:
            return
        beats = self._store.multi_get([store_keys.heartbeat(rank) for rank in self._beating])
        now = time.monotonic()
        for rank, beat in zip(self._beating, beats, strict=True):
            number, operation = json.loads(beat)
            _, last_number, last_operation = self._beats.get(rank, (0.0, -1, ""))
            if number != last_number:
                self._beats[rank] = (now, number, operation)
            if operation != last_operation:
                self._last_progress = now


def _cause(status: int, log: str) -> str:
    tail = f"; the end of its log: {log}" if log else ""
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (out of memory, or by hand)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}{tail}"
    return f"its process ended with status {status}{tail}"
