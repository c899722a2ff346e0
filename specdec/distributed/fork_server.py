"""Parent process of the ranks that the command line starts: imports once, then forks all of them.

Importing torch and transformers takes seconds of CPU time, which this process spends once for all
ranks. It also kills every remaining rank, stopped ones included, when its standard input closes,
that is when rank 0 closes it or dies. ``multiprocessing``'s forkserver does neither of two things:
it leaves stopped children behind when the parent is killed, and it re-imports the user's main
script in every child, which fails for scripts without an ``if __name__ == "__main__"`` guard.

    python -m specdec.distributed.fork_server ADDRESS PORT SIZE LOGS keep|remove

ADDRESS and PORT are those of the store at which all SIZE ranks meet, rank 0 included. The last
argument says whether to keep LOGS at the end. The process prints one JSON line per event:
{"pids": [...]} after forking, in the order of ranks, then {"rank": r, "status": s} per ended rank
(negative: signal).
"""

import json
import os
import selectors
import shutil
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from specdec.distributed import worker

_POLL_S = 0.05


def main(argv: list[str]) -> int:
    address, port, size, logs = argv[0], int(argv[1]), int(argv[2]), Path(argv[3])
    keep_logs = argv[4] == "keep"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles both, and then ends the ranks
    assert threading.active_count() == 1, "forking is only safe in a single-threaded process"
    ranks: dict[int, int] = {}
    for rank in range(1, size):
        pid = os.fork()
        if pid == 0:
            _run_rank(address, port, rank, size, logs)
        ranks[pid] = rank
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
    """Reports each rank's end and removes it from ``ranks`` (pid -> rank); returns whether standard
    input closed before all had ended.
    """
    _print_event({"pids": list(ranks)})
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


def _run_rank(address: str, port: int, rank: int, size: int, logs: Path) -> NoReturn:
    status = 1
    try:
        log = os.open(logs / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        timeout = timedelta(seconds=60)
        store = dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
        status = worker.serve(store, rank, size, loopback=True)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # skip clean-up handlers, which would wait for peers


def _print_event(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201 - standard output is the protocol


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
