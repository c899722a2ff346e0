"""Runs other runtimes in worker processes, each with a Python environment of its own below
``SPECDEC_CACHE``.

Messages are lines of JSON over the worker's standard input and output; the worker measures times
itself.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import cache_dir

_WORKERS = Path(__file__).parent / "workers"
_DONE = "specdec.json"  # written last: a folder without it is incomplete
_SHOWN = 400  # characters of a failed program's output that a message shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    title: str
    packages: tuple[str, ...]  # pip requirements of the environment
    methods: tuple[str, ...] = ("generate", "draft", "lookup")
    unwanted: tuple[str, ...] = ()  # packages that pip installs with them, uninstalled again
    # Supported values of ``model.dtype``, to which models are converted. Empty for a runtime that
    # reads GGUF files: a file states the types of its weights.
    dtypes: tuple[str, ...] = ("float32",)


RUNTIMES: Mapping[str, Runtime] = {
    "llamacpp": Runtime(
        title="llama.cpp",
        packages=("xllamacpp==2026.10.11549",),
        methods=("generate", "draft", "ngram"),
        dtypes=(),
    ),
    "openvino": Runtime(
        title="OpenVINO GenAI",
        packages=("openvino-genai==2026.4.1.0", "torch==2.13.0", "optimum-intel==2.2.0"),
        # Language models do without it, and a build that is not torch's breaks transformers.
        unwanted=("torchvision",),
        dtypes=("float32", "bfloat16"),
    ),
    "ort": Runtime(
        title="ONNX Runtime GenAI",
        packages=("onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalOutput:
    tokens: Sequence[int]  # with the end token
    times_s: Sequence[float]  # per token, from the start of the request
    wall_s: float  # of the request, prefill included
    rounds: int  # target passes that produced tokens
    proposed: int | None = 0  # draft tokens; None if the runtime does not count them
    accepted: int = 0
    draft_passes: int = 0


def rivals_dir() -> Path:
    return cache_dir() / "rivals"


def is_installed(name: str) -> bool:
    done = rivals_dir() / name / _DONE
    return done.is_file() and done.read_text() == _contents(RUNTIMES[name])


def install(name: str, note: Callable[[str], None]) -> None:
    runtime, folder = RUNTIMES[name], rivals_dir() / name
    if is_installed(name):
        note(f"{folder} is installed")
        return
    note(f"installing {', '.join(runtime.packages)} into {folder}")
    pip = [*_python(folder), "-m", "pip", "--disable-pip-version-check"]
    venv = [sys.executable, "-m", "venv", "--clear", str(folder)]
    commands = [venv, [*pip, "install", "-q", *runtime.packages]]
    if runtime.unwanted:
        commands.append([*pip, "uninstall", "-q", "-y", *runtime.unwanted])
    for words in commands:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")  # noqa: S603
        if done.returncode:
            end = " ".join((done.stdout + done.stderr).split())[-_SHOWN:]
            raise UserError(f"{runtime.title} cannot be installed: {end}")
    (folder / _DONE).write_text(_contents(runtime))


def worker_command(name: str) -> list[str]:
    if not is_installed(name):
        raise UserError(
            f"{RUNTIMES[name].title} is not installed: run `specdec rivals install {name}`, or"
            " leave its rows out"
        )
    return [*_python(rivals_dir() / name), "-u", str(_WORKERS / "serve.py"), f"decode_{name}"]


def converted(name: str, model: Path) -> Path:
    script = (_WORKERS / f"decode_{name}.py").read_text()
    files = sorted(p for p in model.iterdir() if p.suffix in (".json", ".safetensors"))
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    parts = [str(model.resolve()), stats, RUNTIMES[name].packages, script]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    folder = rivals_dir() / "models" / f"{name}-{digest}"
    if not (folder / _DONE).is_file():
        worker = RivalProcess(name)
        shutil.rmtree(folder, ignore_errors=True)
        site = sysconfig.get_path("purelib")
        worker.ask("convert", source=str(model), folder=str(folder), site=site)
        worker.close()
        (folder / _DONE).write_text(json.dumps({"model": str(model)}) + "\n")
    return folder


class RivalProcess:
    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._title = RUNTIMES[name].title
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - a script of our own
            worker_command(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.pids = (self._process.pid,)

    def ask(self, op: str, **message: Any) -> Any:
        """Returns the result of the worker's function ``op``; if it fails, raises UserError."""
        assert self._process.stdout is not None
        reply: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # of a worker that has ended
            print(json.dumps({"op": op, **message}), file=self._process.stdin, flush=True)
            reply = json.loads(self._process.stdout.readline())
        if "result" not in reply:
            self._errors.seek(0)
            reason = reply.get("error") or self._errors.read().decode(errors="replace")
            self.close()
            words = " ".join(str(reason).split())[-_SHOWN:] or "it ended without a message"
            raise UserError(f"{self._title} failed: {words}; leave its rows out")
        return reply["result"]

    def generate(
        self, prompt: Sequence[int], *, max_new_tokens: int, sampling: Mapping[str, Any]
    ) -> RivalOutput:
        message = {"prompt": prompt, "max_new_tokens": max_new_tokens, "sampling": sampling}
        return RivalOutput(**self.ask("generate", **message))

    def close(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=5)  # closes its input, which ends it
        self._process.kill()  # does nothing to a process that has ended
        self._process.wait()
        self._errors.close()


def _contents(runtime: Runtime) -> str:
    return json.dumps({"packages": runtime.packages, "without": runtime.unwanted}) + "\n"


def _python(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-E"]  # without PYTHONPATH, which is specdec's
