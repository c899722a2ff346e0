"""Runs the command line as a process and lists its ranks (Linux: from /proc)."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

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


def module(*words: str, **more: str) -> subprocess.Popen[str]:
    """Starts ``python -m`` in its own process group, with one pipe for both outputs.

    Args:
        words: module and arguments.
        more: environment variables.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**environment(), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


class Command:
    """``specdec`` as a process in its own session, for tests that send signals to it.

    A server forks it that has imported the library, for which a fresh interpreter needs seconds.

    Args:
        words: command and arguments.
        log: file for its standard error.
        folders: further ones of ``PYTHONPATH``.
    """

    def __init__(self, *words: str, log: Path, folders: Sequence[Path] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._log = log
        self._process = context.Process(
            target=_run_command, args=(words, log, [str(folder) for folder in folders])
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status (negative: signal), None while it runs."""
        return self._process.exitcode

    @property
    def message(self) -> str:
        """What it has printed to standard error."""
        return self._log.read_text(encoding="utf-8")

    def wait(self, seconds: float) -> None:
        self._process.join(seconds)
        assert self.status is not None, f"not over within {seconds:g} s: {self.message}"


_IMPORTED = ["specdec.cli.main", "specdec.runs.jobs", "matplotlib.figure"]


def _run_command(words: Sequence[str], log: Path, folders: list[str]) -> NoReturn:
    os.setsid()
    os.chdir(ROOT)
    os.environ.update(environment(), PYTHONPATH=os.pathsep.join([str(ROOT), *folders]))
    sys.path[:0] = folders
    for target, file in ((1, Path(os.devnull)), (2, log)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from specdec.cli.main import main

    try:
        sys.exit(main(words))
    finally:
        atexit._run_exitfuncs()  # as an interpreter does, but no process of multiprocessing


@contextmanager
def started(folder: Path, *overrides: str) -> Iterator[Command]:
    """Starts ``specdec run``; kills it and all its ranks afterwards.

    Args:
        folder: the run folder.
        overrides: beside ``OVERRIDES``; ~KEY leaves out one of these.
    """
    left_out = {word[1:] for word in overrides if word.startswith("~")}
    base = [word for word in OVERRIDES if word.partition("=")[0] not in left_out]
    more = [word for word in overrides if not word.startswith("~")]
    words = ("run", *base, *more, f"output_dir={folder}")
    command = Command(*words, log=folder.parent / f"{folder.name}.err")
    try:
        yield command
    finally:
        for pid in [*ranks_of(command.pid), command.pid]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        command.wait(60.0)


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
