"""Starts ranks on this machine; they end when this process (rank 0) ends."""

import atexit
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

NOTE = "specdec: "  # prefix of informational log lines, which error messages leave out
_LOG_CHARS = 400
_EXIT_TIMEOUT_S = 5.0
_MODULE = "specdec.distributed.fork_server"


class _ForkServer:
    """Starts and reaches the fork server of this process (module ``fork_server``).

    The server is a fork of this process if it has a single thread, which saves seconds of
    imports. Otherwise, as in a notebook, forking is not safe and the server is a new interpreter.
    """

    def __init__(self) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process
        self._control, theirs = socket.socketpair()
        with theirs:
            if _has_one_thread():
                self._pid = self._fork(theirs.fileno())
            else:
                environment = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                    "OPENBLAS_NUM_THREADS": "1",  # numpy must not start threads before the fork
                }
                self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                    [sys.executable, "-m", _MODULE],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self.log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C in the terminal reaches rank 0 only
                )
                self._pid = self._process.pid
        atexit.register(self._end)

    def _fork(self, control: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            gc.freeze()  # objects of the parent must not close files under reused numbers
            os.setsid()  # Ctrl-C in the terminal reaches rank 0 only
            for target, source in ((0, control), (1, self.log.fileno()), (2, self.log.fileno())):
                os.dup2(source, target)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # locks and pipes of this process
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not what pytest captures with
            runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
        finally:
            os._exit(0)

    def connect(self) -> socket.socket:
        """Makes the server fork a *keeper*, the parent of new ranks; returns a socket to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
        return ours

    def _end(self) -> None:
        self._control.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _has_one_thread() -> bool:
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1


@cache
def start_fork_server() -> _ForkServer:
    """Returns this process's fork server; the first call starts it."""
    return _ForkServer()


def _connect() -> tuple[_ForkServer, socket.socket]:
    server = start_fork_server()
    try:
        return server, server.connect()
    except OSError:  # the server has been killed
        start_fork_server.cache_clear()
        server = start_fork_server()
        return server, server.connect()


class Processes:
    """The processes of one group: the ranks and their parent, the keeper. Rank r prints to
    ``rank<r>.log`` in the caller's folder or in a temporary one.
    """

    def __init__(
        self, *, address: str, port: int, size: int, threads: int | None, logs: Path | None = None
    ) -> None:
        """Starts the processes; they connect to the store at ``address``:``port`` themselves.

        ``size`` includes rank 0. Each rank has ``threads`` threads (None: cores / ``size``). Log
        files are in ``logs``; None uses a temporary folder, removed when the ranks have ended.
        """
        self.ended: dict[int, int] = {}
        self.pids: list[int] = []
        self._keeper: list[int] = []
        self._size = size
        self._keep_logs = logs is not None
        self._logs = logs or Path(tempfile.mkdtemp(prefix="specdec-ranks-"))
        self._logs.mkdir(parents=True, exist_ok=True)
        per_rank = threads or max(1, (os.cpu_count() or 1) // size)
        limits = {"OMP_NUM_THREADS": str(per_rank), "MKL_NUM_THREADS": str(per_rank)}
        request = {
            "address": address,  # of the store at which all ranks meet
            "port": port,
            "size": size,  # ranks with rank 0
            "threads": per_rank,
            "logs": str(self._logs),  # folder of rank<r>.log
            "keep_logs": self._keep_logs,  # else the keeper removes the folder at its end
            "environment": {**os.environ, **limits},
            "path": [p for p in sys.path if p],
        }
        self._server, self._connection = _connect()
        with suppress(BrokenPipeError):  # then no event comes either
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._reader = threading.Thread(target=self._read_events, daemon=True)
        self._reader.start()

    def log(self, rank: int) -> str:
        """Returns the end of a rank's log as one line; if that log is empty, the end of the log of
        the keeper or else of the fork server.
        """
        texts = []
        for name in (f"rank{rank}.log", "fork_server.log"):
            file = self._logs / name
            texts.append(file.read_text(errors="replace") if file.is_file() else "")
        texts.append(os.pread(self._server.log.fileno(), 1 << 20, 0).decode(errors="replace"))
        for text in texts:
            lines = [line for line in text.splitlines() if not line.startswith(NOTE)]
            shown = " ".join(" ".join(lines).split())
            if shown:
                return shown[-_LOG_CHARS:]
        return ""

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.ended) < self._size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)  # makes the keeper kill the ranks and exit
        self._reader.join(_EXIT_TIMEOUT_S)
        if self._reader.is_alive():
            for pid in (*self._keeper, *self.pids):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if not self._keep_logs:
            shutil.rmtree(self._logs, ignore_errors=True)

    def _read_events(self) -> None:
        with suppress(ConnectionResetError), self._connection.makefile("r") as lines:
            for line in lines:
                event = json.loads(line)
                if "pids" in event:
                    self.pids, self._keeper = event["pids"], [event["keeper"]]
                else:
                    self.ended[event["rank"]] = event["status"]
        self._connection.close()
        for rank in range(1, self._size):  # the keeper has died: all ranks count as ended
            self.ended.setdefault(rank, -signal.SIGKILL)
