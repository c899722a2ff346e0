"""The parent of the ranks that the command line starts: imports once, then forks them all.

Importing torch and transformers takes seconds of CPU; nine ranks on two cores would take most of a
minute. This process does it once, with nothing running in it, and the ranks are its copies. It also
sees to it that none outlives rank 0: when its input ends, it kills what is left.

    python -m specdec.distributed.fork_server ADDRESS PORT SIZE LOGS keep|remove

(keep or remove LOGS at the end) prints one JSON line per event: {"born": [pid, ...]}, then
{"rank": r, "status": s} as ranks end (negative: the signal that ended it).
"""

from __future__ import annotations

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
    """Forks ranks 1 .. SIZE - 1 and waits for them, or for the end of its input."""
    address, port, size, logs = argv[0], int(argv[1]), int(argv[2]), Path(argv[3])
    keep = argv[4] == "keep"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; rank 0 decides
    assert threading.active_count() == 1, "forking is safe only while nothing runs"
    living: dict[int, int] = {}
    for rank in range(1, size):
        pid = os.fork()
        if pid == 0:
            _be_rank(address, port, rank, size, logs)
        living[pid] = rank
    gone = True
    try:
        gone = _watch(living)
    except BrokenPipeError:
        pass  # rank 0 does not listen any more
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)  # they are our children: the number is still theirs
        for pid in living:
            os.waitpid(pid, 0)
        if gone and not keep:
            shutil.rmtree(logs, ignore_errors=True)
    return 0


def _watch(living: dict[int, int]) -> bool:
    """Tells of every end until nobody is left (``living``: pid -> rank), or rank 0 has gone.

    Returns:
        Whether rank 0 has gone, or wants no more of the ranks.
    """
    _tell({"born": sorted(living)})
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while living:
            if selector.select(_POLL_S) and not os.read(sys.stdin.fileno(), 4096):
                return True
            while living:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                rank = living.pop(pid)
                _tell({"rank": rank, "status": os.waitstatus_to_exitcode(status)})
    return False


def _be_rank(address: str, port: int, rank: int, size: int, logs: Path) -> NoReturn:
    """Becomes a rank; what it prints goes to its log."""
    status = 1
    try:
        log = os.open(logs / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        store = dist.TCPStore(
            address, port, None, False, timedelta(seconds=60), wait_for_workers=False
        )
        status = worker.serve(store, rank, size, loopback=True)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # no clean-up that waits for peers


def _tell(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201 - this is the protocol


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
