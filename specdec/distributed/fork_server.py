"""Parent process of the ranks that the command line starts: imports once, then forks all of them.

Importing torch and transformers takes seconds of CPU time, which this process spends once for all
ranks. It also kills every remaining rank, stopped ones included, when its standard input closes,
that is when rank 0 closes it or dies. ``multiprocessing``'s forkserver does neither of two things:
it leaves stopped children behind when the parent is killed, and it re-imports the user's main
script in every child, which fails for scripts without an ``if __name__ == "__main__"`` guard.

    python -m specdec.distributed.fork_server ADDRESS PORT SOCKETS LOGS keep|remove

SOCKETS are the file descriptors of the ranks' ends of their control links, one per rank, separated
by commas. The last argument says whether to keep LOGS at the end. The process prints one JSON line
per event: {"pids": [...]} after forking, then {"rank": r, "status": s} per ended rank (negative:
signal).
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from specdec.distributed import worker
from specdec.distributed.row_links import Sockets

_POLL_S = 0.05


def main(argv: list[str]) -> int:
    """Forks one rank per socket and waits until all have ended or standard input closes."""
    address, port, logs = argv[0], int(argv[1]), Path(argv[3])
    ends = dict(enumerate(map(int, argv[2].split(",")), 1))
    keep_logs = argv[4] == "keep"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles both, and then ends the ranks
    assert threading.active_count() == 1, "forking is only safe in a single-threaded process"
    sockets = _sockets(ends)
    ranks: dict[int, int] = {}
    for rank in ends:
        pid = os.fork()
        if pid == 0:
            _run_rank(address, port, rank, sockets, logs)
        ranks[pid] = rank
    _close(sockets.values())  # a link ends when its rank ends
    closed = True
    try:
        closed = _watch(ranks)
    except BrokenPipeError:
        pass  # rank 0 has died
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)  # not yet waited for, so the pid cannot have been reused
        for pid in ranks:
            os.waitpid(pid, 0)
        if closed and not keep_logs:
            shutil.rmtree(logs, ignore_errors=True)
    return 0


def _watch(ranks: dict[int, int]) -> bool:
    """Reports each rank's end and removes it from ``ranks`` (pid -> rank).

    Returns True if standard input closed, False if all ranks ended first.
    """
    _print_event({"pids": sorted(ranks)})
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while ranks:
            if selector.select(_POLL_S) and not os.read(sys.stdin.fileno(), 4096):
                return True
            while ranks:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                rank = ranks.pop(pid)
                _print_event({"rank": rank, "status": os.waitstatus_to_exitcode(status)})
    return False


def _sockets(ends: dict[int, int]) -> dict[int, Sockets]:
    """Creates the sockets of every rank; ``ends``: rank -> descriptor of its control link."""
    pairs = [socket.socketpair() for _ in range(len(ends) - 1)]  # ranks 1 and 2, 2 and 3, ...
    befores = [None, *(later for _, later in pairs)]
    afters = [*(earlier for earlier, _ in pairs), None]
    return {
        rank: Sockets(socket.socket(fileno=end), before, after)
        for (rank, end), before, after in zip(ends.items(), befores, afters, strict=True)
    }


def _close(sockets: Iterable[Sockets]) -> None:
    for owned in sockets:
        for end in (owned.control, owned.before, owned.after):
            if end is not None:
                end.close()


def _run_rank(
    address: str, port: int, rank: int, sockets: dict[int, Sockets], logs: Path
) -> NoReturn:
    """Runs a rank in the forked process, with its output redirected to its log."""
    status, size = 1, len(sockets) + 1
    try:
        mine = sockets.pop(rank)
        _close(sockets.values())
        log = os.open(logs / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        timeout = timedelta(seconds=60)
        store = dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
        status = worker.serve(store, rank, size, loopback=True, sockets=mine)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # skip clean-up handlers, which would wait for peers


def _print_event(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201 - standard output is the protocol


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
