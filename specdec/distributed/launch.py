"""Starting ranks on this machine: no fixed port, no restarts, threads set, no orphans."""

from __future__ import annotations

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

NOTE = "specdec: "
"""How lines of a log begin that only say what went as it should."""

_LOG_CHARS = 400
_SECONDS_TO_DIE = 5.0


class Processes:
    """The nursery and the ranks that it has forked.

    What ranks print goes to ``rank<r>.log`` in a folder of the caller's, which stays, or in a
    temporary one.

    Attributes:
        ended: rank -> exit status, of ranks that have ended (negative: the signal).
        pids: of the ranks, once they are born.
    """

    def __init__(
        self, *, address: str, port: int, size: int, threads: int | None, logs: Path | None = None
    ) -> None:
        """Starts them; they join the group of the store at ``address``:``port`` by themselves.

        Args:
            address, port: of the store.
            size: ranks, rank 0 included.
            threads: of torch, per rank; None shares the machine's cores among them.
            logs: where the ranks' logs are kept; None for as long as the ranks live.
        """
        self.ended: dict[int, int] = {}
        self.pids: list[int] = []
        self._size = size
        self._keep = logs is not None
        self._logs = logs or Path(tempfile.mkdtemp(prefix="specdec-ranks-"))
        self._logs.mkdir(parents=True, exist_ok=True)
        per_rank = str(threads or max(1, (os.cpu_count() or 1) // size))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": per_rank,
            "MKL_NUM_THREADS": per_rank,
            "OPENBLAS_NUM_THREADS": "1",  # numpy's pool must not be there when ranks are forked
        }
        words = ["-m", "specdec.distributed.fork_server", address, str(port), str(size)]
        fate = "keep" if self._keep else "remove"
        with (self._logs / "nursery.log").open("wb") as log:
            self._nursery = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, *words, str(self._logs), fate],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for rank 0 alone
            )
        threading.Thread(target=self._follow, daemon=True).start()

    def log(self, rank: int) -> str:
        """The end of what a rank (or, before it was born, the nursery) has printed, in one line."""
        for name in (f"rank{rank}.log", "nursery.log"):
            file = self._logs / name
            found = file.read_text(errors="replace") if file.is_file() else ""
            text = " ".join(t for t in found.splitlines() if not t.startswith(NOTE))
            if text.strip():
                return " ".join(text.split())[-_LOG_CHARS:]
        return ""

    def wait(self, seconds: float) -> None:
        """Waits for all ranks to end, for so long."""
        until = time.monotonic() + seconds
        while len(self.ended) < self._size - 1 and time.monotonic() < until:
            time.sleep(0.01)

    def kill(self) -> None:
        """Kills what is left, the stopped included, and waits until it is gone."""
        nursery = self._nursery
        if nursery.stdin is not None:
            with suppress(OSError):
                nursery.stdin.close()  # the nursery kills its children and ends
        try:
            nursery.wait(_SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            nursery.kill()
            nursery.wait()
            for pid in self.pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if not self._keep:
            shutil.rmtree(self._logs, ignore_errors=True)

    def _follow(self) -> None:
        """Thread: takes down what the nursery says."""
        assert self._nursery.stdout is not None
        for line in self._nursery.stdout:
            event = json.loads(line)
            if "born" in event:
                self.pids = event["born"]
            else:
                self.ended[event["rank"]] = event["status"]
        status = self._nursery.wait()
        for rank in range(1, self._size):  # without a nursery there is nobody to ask
            self.ended.setdefault(rank, status)
