"""The command line as a real process, and the ranks below it (Linux: read from /proc)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0  # a loaded machine needs long to start; what is tested is never this slow
OVERRIDES = [
    "strategy=specpipe",
    "policy.width=4",
    "policy.children=2",
    "executor.stages=2",
    "executor.transport=distributed",
    "model=random",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.vocab_size=64",
    "data=stdlib",
    "data.limit=300",
    "max_new_tokens=24",
    "threads=1",
]


def environment() -> dict[str, str]:
    """As for a user who has installed the package."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _hear_interrupts() -> None:
    """A command started in the background of a shell would inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def module(*words: str, stderr: int = subprocess.STDOUT, **more: str) -> subprocess.Popen[str]:
    """``python -m`` in a process group of its own; its output is text in ``stdout``.

    Args:
        words: module and arguments.
        stderr: goes into ``stdout`` as well, unless it is to be apart: nothing else is kept then.
        more: environment variables.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**environment(), **more},
        stdout=subprocess.PIPE if stderr == subprocess.STDOUT else subprocess.DEVNULL,
        stderr=stderr,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_interrupts,
    )


@contextmanager
def started(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """``specdec run`` in its own process group; killed afterwards, with all ranks."""
    words = ("specdec.cli.main", "run", *OVERRIDES, *overrides, f"output_dir={folder}")
    process = module(*words, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        left = [*ranks_of(process.pid), process.pid]
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """Waits for a condition."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return sorted(found)


def ranks_of(pid: int) -> list[int]:
    """Pids of ranks 1, 2, ... of a ``specdec run``, and of what else it has started."""
    return [rank for server in children(pid) for rank in (*children(server), server)]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, zombies apart."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
