"""Runs the command line as a process and lists its ranks (Linux: from /proc)."""

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
PATIENCE_S = 300.0  # starting takes long on a loaded machine; no tested property is this slow
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
    """Environment of a user who has installed the package."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _handle_interrupts() -> None:
    """Resets SIGINT, which commands started in the background of a shell inherit as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def module(*words: str, stderr: int = subprocess.STDOUT, **more: str) -> subprocess.Popen[str]:
    """Starts ``python -m`` in its own process group.

    Args:
        words: module and arguments.
        stderr: STDOUT merges it into the pipe ``stdout``; PIPE keeps only stderr.
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
        preexec_fn=_handle_interrupts,
    )


@contextmanager
def started(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Starts ``specdec run``; kills it and all its ranks afterwards.

    Args:
        folder: the run folder.
        overrides: beside ``OVERRIDES``; ~KEY leaves out one of these.
    """
    left_out = {word[1:] for word in overrides if word.startswith("~")}
    base = [word for word in OVERRIDES if word.partition("=")[0] not in left_out]
    more = [word for word in overrides if not word.startswith("~")]
    words = ("specdec.cli.main", "run", *base, *more, f"output_dir={folder}")
    process = module(*words, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        for pid in [*ranks_of(process.pid), process.pid]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``, oldest first."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                pids.append(int(stat.parent.name))
    return sorted(pids)


def ranks_of(pid: int) -> list[int]:
    """Pids of ranks 1, 2, ... of a ``specdec run``, then of their keeper and the fork server."""
    return [each for child in children(pid) for each in (*ranks_of(child), child)]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
