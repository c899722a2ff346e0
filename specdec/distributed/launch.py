"""Starts the ranks of one machine: free port, no restarts, thread limits, no orphans."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

NOTE = "specdec: "  # prefix of informational log lines, which error messages leave out
_LOG_CHARS = 400
_EXIT_TIMEOUT_S = 5.0


class Processes:
    """The fork server and the ranks that it has forked, which print to ``rank<r>.log`` in the
    caller's folder, or in a temporary one.
    """

    def __init__(
        self, *, address: str, port: int, size: int, threads: int | None, logs: Path | None = None
    ) -> None:
        """Starts the processes; they connect to the store at ``address``:``port`` themselves.

        Without ``threads`` the ranks share the machine's cores; without ``logs`` their logs are
        removed with them.
        """
        self.ended: dict[int, int] = {}
        self.pids: list[int] = []
        self._size = size
        self._keep_logs = logs is not None
        self._logs = logs or Path(tempfile.mkdtemp(prefix="specdec-ranks-"))
        self._logs.mkdir(parents=True, exist_ok=True)
        per_rank = str(threads or max(1, (os.cpu_count() or 1) // size))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": per_rank,
            "MKL_NUM_THREADS": per_rank,
            "OPENBLAS_NUM_THREADS": "1",  # numpy must not start threads before the fork
        }
        module = ["-m", "specdec.distributed.fork_server"]
        arguments = [address, str(port), str(size), str(self._logs)]
        with (self._logs / "fork_server.log").open("wb") as log:
            self._server = subprocess.Popen(  # noqa: S603 - a module of this package
                [sys.executable, *module, *arguments, "keep" if self._keep_logs else "remove"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches rank 0 only
            )
        threading.Thread(target=self._read_events, daemon=True).start()

    def log(self, rank: int) -> str:
        """Returns the end of a rank's log as one line, or of the fork server's if that is empty."""
        for name in (f"rank{rank}.log", "fork_server.log"):
            file = self._logs / name
            lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
            text = " ".join(" ".join(t for t in lines if not t.startswith(NOTE)).split())
            if text:
                return text[-_LOG_CHARS:]
        return ""

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.ended) < self._size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self) -> None:
        server = self._server
        if server.stdin is not None:
            with suppress(OSError):
                server.stdin.close()  # makes the server kill its children and exit
        try:
            server.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
            for pid in self.pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if not self._keep_logs:
            shutil.rmtree(self._logs, ignore_errors=True)

    def _read_events(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            event = json.loads(line)
            if "pids" in event:
                self.pids = event["pids"]
            else:
                self.ended[event["rank"]] = event["status"]
        status = self._server.wait()
        for rank in range(1, self._size):  # the server itself died: all ranks count as ended
            self.ended.setdefault(rank, status)
