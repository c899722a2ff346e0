"""A process that forks worker processes (ranks) for the command or script that has started it.

Importing torch and transformers takes seconds of CPU time, which this process spends once for all
groups of ranks that it forks. ``multiprocessing``'s forkserver lacks two things: it leaves stopped
children behind when the parent is killed, and it runs the user's main script again in every child,
which fails for scripts without an ``if __name__ == "__main__"`` guard.

``launch`` runs this module with one end of a socket pair as standard input, and sends a further
socket through it for each group of ranks. This process then forks a *keeper*, the parent of the
group's ranks. The keeper forks ranks 1 and up; when its socket closes, because the command (rank 0)
closed it or died, the keeper kills the ranks that are left, also stopped ones. Through this socket,
rank 0 sends one JSON line (``launch.Processes``), and the keeper one line per event: {"keeper":
pid, "pids": [...]} after forking, in the order of ranks, then {"rank": r, "status": s} for each
rank that ends (a negative status is a signal).
"""

import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers.modeling_utils  # noqa: F401 - seconds of CPU time: once, not in each rank

from specdec.distributed import worker

_POLL_S = 0.05


def main() -> int:
    """Forks a keeper for each socket received through standard input, until that is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles both, and then ends the ranks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
    assert threading.active_count() == 1, "forking is only safe in a single-threaded process"
    control = socket.socket(fileno=0)
    while True:
        _, received, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            return 0
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep_and_exit(socket.socket(fileno=received[0]))
        os.close(received[0])


def _keep_and_exit(connection: socket.socket) -> NoReturn:
    with connection.makefile("r", encoding="utf-8") as lines:
        request = json.loads(lines.readline())
    logs = Path(request["logs"])
    _redirect(logs / "fork_server.log")
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    ranks: dict[int, int] = {}
    closed = True
    try:
        for rank in range(1, request["size"]):
            pid = os.fork()
            if pid == 0:
                connection.close()  # so that rank 0 sees when the keeper dies
                _run_rank(rank, request)
            ranks[pid] = rank
        closed = _watch(connection, ranks)
    except (BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has died
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)  # not yet waited for, so the pid cannot have been reused
        for pid in ranks:
            os.waitpid(pid, 0)
        if closed and not request["keep_logs"]:
            shutil.rmtree(logs, ignore_errors=True)
        os._exit(0)


def _watch(connection: socket.socket, ranks: dict[int, int]) -> bool:
    """Reports each rank that ends to rank 0 and removes it from ``ranks`` (pid -> rank). Returns
    True if the connection closed before all ranks had ended.
    """

    def send(event: dict[str, Any]) -> None:
        connection.sendall(json.dumps(event).encode() + b"\n")

    send({"keeper": os.getpid(), "pids": list(ranks)})
    while ranks:
        readable, _, _ = select.select([connection], [], [], _POLL_S)
        if readable and not connection.recv(4096):
            return True
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            rank = ranks.pop(pid)
            send({"rank": rank, "status": os.waitstatus_to_exitcode(status)})
    return False


def _run_rank(rank: int, request: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        _redirect(Path(request["logs"]) / f"rank{rank}.log")
        torch.set_num_threads(request["threads"])
        timeout = timedelta(seconds=60)
        store = dist.TCPStore(
            request["address"], request["port"], None, False, timeout, wait_for_workers=False
        )
        status = worker.serve(store, rank, request["size"], loopback=True)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # skip clean-up handlers, which would wait for peers


def _redirect(log: Path) -> None:
    """Redirects this process's output and errors to ``log``; its standard input becomes empty."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    sys.exit(main())
