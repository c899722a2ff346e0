"""A process that has imported torch and the other libraries, and forks to run a command.

Importing them takes longer than many certificates. The process never imports the certified code:
each child imports it from the folder that it is given. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = 124
"""Status of a process that was ended, as of the command ``timeout``."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_OWN = ("specdec", "strategies", "tests")
_LIST = (
    "import json, sys, specdec.cli.main, specdec.certify, specdec.runs.jobs, transformers as t;"
    "t.LlamaForCausalLM; print(json.dumps([*sys.modules]))"
)
_POLL_S = 0.05


class Warm:
    """The process; a context manager."""

    def __init__(self, libraries: Sequence[str]) -> None:
        """Starts it, to import ``libraries``; it is ready when it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.planted.warm"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send(libraries)

    def _send(self, content: Sequence[object]) -> None:
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps(content) + "\n")
        self._process.stdin.flush()

    def run(self, words: Sequence[str], code: Path, output: Path, timeout_s: float) -> int:
        """Runs a module with arguments as ``python -m`` does; returns its exit status.

        Args:
            words: the module and its arguments.
            code: folder of the packages; the working directory.
            output: file for everything that is printed.
            timeout_s: the command and its children are ended after this time.
        """
        assert self._process.stdout is not None, "a pipe"
        self._send([list(words), str(code), str(output), timeout_s])
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.close()
        self._process.wait()


class Pool:
    """Processes that serve several calls; a context manager."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._stack = ExitStack()
        self._free: SimpleQueue[Warm] = SimpleQueue()
        names = _libraries()
        for _ in range(jobs):
            self._free.put(self._stack.enter_context(Warm(names)))

    @contextmanager
    def one(self) -> Iterator[Warm]:
        """A process that no other thread uses meanwhile."""
        warm = self._free.get()
        try:
            yield warm
        finally:
            self._free.put(warm)

    def each(self, work: Callable[[Warm, Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """``work(warm, item)`` for every item, in order, on all processes."""

        def run(item: Item) -> Result:
            with self.one() as warm:
                return work(warm, item)

        with ThreadPoolExecutor(self._jobs) as threads:
            yield from threads.map(run, items)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _libraries() -> list[str]:
    """Names of all modules that the certified code imports, but for that code itself."""
    listed = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True)
    names: list[str] = json.loads(listed.stdout.splitlines()[-1])
    return [name for name in names if name.partition(".")[0] not in _OWN]


def _become(words: Sequence[str], code: str, output: str) -> None:
    """Child: runs the module; does not return."""
    os.setsid()
    os.chdir(code)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in [n for n in sys.modules if n.partition(".")[0] in _OWN]:
        del sys.modules[name]
    sys.path = [code, *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = code  # of ranks, which are processes of their own
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.argv = list(words)
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()


def _run(words: Sequence[str], code: str, output: str, timeout_s: float) -> int:
    """Runs the module in a child; returns its status."""
    child = os.fork()
    if not child:
        status = 1
        try:
            _become(words, code, output)
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            result = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            result = TIMED_OUT
            break
        time.sleep(_POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # ranks that the command left behind
    return result


def main() -> None:
    """Imports libraries, then answers each request with an exit status until its input ends."""
    for name in json.loads(sys.stdin.readline()):
        with suppress(Exception):  # modules that others make, under names of their own
            importlib.import_module(name)
    for line in sys.stdin:
        print(_run(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
