"""Groups of worker processes (ranks) that the executors of one process share.

A group is started by this process for the first executor that needs it, unless torchrun or Slurm
has started all ranks (``use_group``).
"""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from specdec.distributed.group import RankGroup
from specdec.distributed.launch import Processes, start_fork_server
from specdec.errors import UserError

_ADDRESS = "127.0.0.1"
_local: dict[tuple[int, int | None, int], RankGroup] = {}
"""Groups that this process started; key: (size with rank 0, threads per rank, ``number``)."""
_external: RankGroup | None = None
_logs: Path | None = None


def use_group(group: RankGroup | None) -> None:
    global _external
    _external = group


def prepare_ranks() -> None:
    """Starts the fork server, which starts the ranks. If called before any thread is started, the
    fork server is a fork of this process, which saves the time to import everything again.
    """
    if _external is None:
        start_fork_server()


@contextmanager
def rank_logs_in(folder: Path) -> Iterator[None]:
    global _logs
    previous, _logs = _logs, folder
    try:
        yield
    finally:
        _logs = previous


class GroupHandle:
    """Reference-counted handle on a rank group.

    Executors with the same number of threads per rank share a group if it has as many ranks as they
    need or more, so that a comparison of several strategies starts processes only once.
    """

    def __init__(self, num_ranks: int, *, threads: int | None = None, number: int = 0) -> None:
        """Joins a running group with at least ``num_ranks`` other processes, or starts a group.

        ``threads`` is the number of torch threads per rank. None divides the machine's cores among
        the ranks, and then only a group of exactly ``num_ranks`` is joined. Executors that work at
        the same time need handles with different values of ``number``.
        """
        self._key = _key_of(num_ranks + 1, threads, number)
        self.num_ranks = num_ranks
        self._released = False
        if _external is not None:
            if number:
                raise UserError(
                    "executor=replicated starts the processes of its copies itself: run it without"
                    " torchrun or Slurm"
                )
            if _external.size <= num_ranks:
                raise UserError(
                    f"this executor needs {num_ranks + 1} ranks (the controller and {num_ranks} for"
                    f" the stages), but {_external.size} were started: set torchrun's or srun's"
                    " number of processes, or lower executor.stages"
                )
            self.group = _external
            return
        group = _local.get(self._key)
        if group is None or not group.alive:
            group = _local[self._key] = _start(self._key[0], threads)
        group.num_handles += 1
        self.group = group

    def release(self, *, broken: bool = False) -> None:
        if broken:
            self.group.kill()
        if self._released or self.group is _external:
            return
        self._released = True
        self.group.num_handles -= 1
        if not self.group.num_handles:
            if _local.get(self._key) is self.group:
                del _local[self._key]
            self.group.close()


def _key_of(size: int, threads: int | None, number: int) -> tuple[int, int | None, int]:
    """Returns the key in ``_local`` of the smallest group that can be joined, or of a new one."""
    own = size, threads, number
    if threads is None:
        return own
    alike = [key for key, group in _local.items() if group.alive and key[1:] == own[1:]]
    return min((key for key in alike if key[0] >= size), default=own)


def _start(size: int, threads: int | None) -> RankGroup:
    prepare_ranks()  # before the store's threads
    store = dist.TCPStore(_ADDRESS, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    processes = Processes(address=_ADDRESS, port=store.port, size=size, threads=threads, logs=_logs)
    try:
        return RankGroup(store=store, size=size, loopback=True, processes=processes)
    except BaseException:
        processes.kill()
        raise


@atexit.register
def _kill_all() -> None:
    for group in _local.values():
        group.kill()
    _local.clear()
