"""Which group of ranks a strategy runs on: started for it, shared with others, or given."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from specdec.distributed.group import RankGroup
from specdec.distributed.launch import Processes
from specdec.errors import UserError

_ADDRESS = "127.0.0.1"


@dataclass(slots=True)
class _Held:
    """A group and how many executors use it."""

    group: RankGroup
    holders: int = 0


_local: dict[tuple[int, int | None], _Held] = {}
_given: RankGroup | None = None
_logs: Path | None = None


def give(group: RankGroup | None) -> None:
    """Makes every executor use ``group``, which something else has started (None: no more)."""
    global _given
    _given = group


@contextmanager
def logs_in(folder: Path) -> Iterator[None]:
    """Ranks that are started inside leave their logs in ``folder``."""
    global _logs
    before, _logs = _logs, folder
    try:
        yield
    finally:
        _logs = before


class Lease:
    """The right to use a group until ``release``.

    Executors that need the same number of ranks share them, so the rows of a comparison start
    processes once. With the last lease the ranks end.

    Attributes:
        group: the ranks.
    """

    def __init__(self, num_ranks: int, *, threads: int | None = None) -> None:
        """Finds or starts a group.

        Args:
            num_ranks: ranks besides this one.
            threads: of torch, per rank; None shares the machine's cores among them.

        Raises:
            UserError: if ranks were given, but fewer.
            RankFailure: if ranks cannot be started.
        """
        self._key = (num_ranks + 1, threads)
        self._released = False
        if _given is not None:
            if _given.size <= num_ranks:
                raise UserError(
                    f"this executor needs {num_ranks + 1} ranks (the controller and {num_ranks} for"
                    f" the stages), but {_given.size} were started: set torchrun's or srun's"
                    " number of processes, or lower executor.stages"
                )
            self.group = _given
            return
        held = _local.get(self._key)
        if held is None or not held.group.alive:
            held = _local[self._key] = _Held(_start(num_ranks + 1, threads))
        held.holders += 1
        self.group = held.group

    def release(self, *, broken: bool = False) -> None:
        """Gives the group back; ``broken``: it is in the middle of a step and of no more use."""
        if broken:
            self.group.kill()
        if self._released or self.group is _given:
            return
        self._released = True
        held = _local.get(self._key)
        if held is not None and held.group is self.group:
            held.holders -= 1
            if not held.holders:
                del _local[self._key]
                self.group.close()


@contextmanager
def held(num_ranks: int, *, threads: int | None = None) -> Iterator[None]:
    """Keeps ranks between executors of ``num_ranks`` that come one after the other; none for 0."""
    lease = Lease(num_ranks, threads=threads) if num_ranks else None
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def _start(size: int, threads: int | None) -> RankGroup:
    store = dist.TCPStore(_ADDRESS, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    processes = Processes(address=_ADDRESS, port=store.port, size=size, threads=threads, logs=_logs)
    try:
        return RankGroup(store=store, size=size, loopback=True, processes=processes)
    except BaseException:
        processes.kill()
        raise


@atexit.register
def _end_all() -> None:
    for held in list(_local.values()):
        held.group.kill()
    _local.clear()
