"""The console script ``specdec`` dispatches to a command and maps errors to exit statuses.

Modules of commands import torch, transformers and matplotlib within functions: these take seconds
to import, which ``--help`` and refusals should not need.
"""

import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specdec import __version__
from specdec.cli.arguments import read_arguments
from specdec.errors import RankFailure, UserError
from specdec.files import is_full
from specdec.parts.fields import did_you_mean

_FAILED, BAD_INPUT, _RANK_FAILED, _INTERRUPTED, _TERMINATED = 1, 2, 3, 130, 143
_MAX_SHOWN = 200  # characters of a path or of another library's reason in a message
_LONGEST = 1000  # characters of a message
# Commands that start their ranks themselves.
_ONE_PROCESS = ("run", "compare", "verify", "profile", "plan", "reproduce")
_LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
"""Launcher -> environment variables: one it always sets, this process's rank, number of ranks."""

_TORCH_FULL = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
"""Texts of torch's out-of-memory errors, which are plain ``RuntimeError`` on a CPU."""

_NO_SUCH_PLACE = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES}
_NO_SUCH_PLACE |= {errno.EPERM, errno.EROFS}
"""Errors for which the path is to blame, so that they count as bad input."""

_COMMANDS = {  # command, which is also the module's name -> what it does
    "run": "one strategy on one workload; -m sweeps",
    "compare": "several strategies on the same prompts: table and plot",
    "verify": "certify that a configuration is lossless",
    "train": "drafters for a model of your own: EAGLE-3, Medusa, exit heads, a draft",
    "doctor": "which reading of an EAGLE head its target accepts best",
    "profile": "latency profile of this hardware, and trees that suit it",
    "plan": "which method, sizes and layout, for your models on your machines",
    "record": "a draft's ranks of texts that a target wrote, for model=replay",
    "fit": "a law of hits from measured acceptance, for model=",
    "trace": "timeline of all ranks and the tree's growth, of a traced run",
    "report": "one HTML page and pictures of a run, comparison or sweep",
    "reproduce": "a paper's table or figure, beside its own values",
    "models": "real language models from packages: install smollm2",
    "rivals": "other CPU runtimes as rows: their environments",
    "worker": "one rank of a job that torchrun or Slurm starts",
    "list": "strategies, their parts, datasets, profiles",
}
_USAGE = """\
specdec: composable speculative decoding

{commands}

`specdec COMMAND --help` explains a command. SPECDEC_DATA names the folder of the
data sets; SPECDEC_TRACEBACK=1 shows where an error was raised.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status.

    The status is 0, 1 if disk or memory is full, 2 for bad input, 3 if a rank failed, 130 if
    interrupted, 143 if ended by SIGTERM. A defect of the library is raised with its traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _terminating_like_ctrl_c():
            return _dispatch(words)
    except KeyboardInterrupt as error:
        ended = isinstance(error, _Terminated)
        reason = "ended by SIGTERM" if ended else "interrupted"
        print(f"specdec: {reason}; start the same command again to continue", file=sys.stderr)
        return _TERMINATED if ended else _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) ended; keep Python from printing an error when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, RuntimeError, MemoryError, OSError) as error:  # RankFailure too
        message, status = _explain(error)
        if not message or os.environ.get("SPECDEC_TRACEBACK"):
            raise
        if len(message) > _LONGEST:  # the advice is at the end
            message = f"{message[: _LONGEST * 3 // 4]} [...] {message[-(_LONGEST // 4) :]}"
        print(f"specdec: {message}", file=sys.stderr)
        return status


class _Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which Slurm and ``timeout`` send."""


@contextmanager
def _terminating_like_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    process = os.getpid()

    def end(number: int, _frame: object) -> None:
        if os.getpid() != process:
            os._exit(_TERMINATED)  # a forked child, which has nothing to tidy up
        signal.signal(number, signal.SIG_IGN)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _explain(error: Exception) -> tuple[str, int]:
    text = " ".join(str(error).split())
    if isinstance(error, UserError | RankFailure):
        return text, BAD_INPUT if isinstance(error, UserError) else _RANK_FAILED
    if isinstance(error, MemoryError) or any(full in text for full in _TORCH_FULL):
        return (
            f"memory is used up ({text[:_MAX_SHOWN]}): choose smaller trees (keys of policy), a"
            " smaller batch_size, shorter prompts or a smaller model"
        ), _FAILED
    if isinstance(error, OSError) and is_full(error):
        return (
            f"{error.strerror}: make room, then start the same command again; it continues after"
            " the prompts that are on disk"
        ), _FAILED
    if isinstance(error, OSError) and error.filename and error.errno in _NO_SUCH_PLACE:
        path = str(error.filename)[:_MAX_SHOWN]
        return f"{path!r} cannot be used ({error.strerror}): give another path", BAD_INPUT
    return "", _FAILED


def _launched_beside_others(command: str) -> bool:
    for launcher, (started, rank, size) in _LAUNCHERS.items():
        ranks = int(os.environ.get(size, "1")) if started in os.environ else 1
        if ranks < 2 or command not in _ONE_PROCESS:
            continue
        if os.environ.get(rank, "0") != "0":
            return True
        raise UserError(
            f"{launcher} has started `specdec {command}` {ranks} times, and each would do all the"
            f" work: start it once without {launcher} (executor.transport=distributed starts the"
            f" ranks), or give {launcher} the command `specdec worker CONFIG OUTPUT_DIR`"
            " (docs/distributed.md)"
        )
    return False


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        lines = "\n".join(f"  specdec {name:<9} {about}" for name, about in _COMMANDS.items())
        print(_USAGE.format(commands=lines), end="")
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        print(f"specdec {__version__}")
        return 0
    command, *rest = words
    if command not in _COMMANDS:
        raise UserError(f"{command} is not a command: {did_you_mean(command, _COMMANDS)}")
    if _launched_beside_others(command):
        return BAD_INPUT
    elsewhere = {"reproduce": "experiments.reproduce.command"}
    module = vars(importlib.import_module(elsewhere.get(command, f"specdec.cli.{command}")))
    if "HELP" in module and {"-h", "--help"} & {*rest}:
        print(module["HELP"], end="")
        return 0
    status: int = module["main"](read_arguments(rest, module.get("FLAGS", ())))
    return status


if __name__ == "__main__":
    sys.exit(main())
