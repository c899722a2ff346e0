"""Manages Python environments of other runtimes, and models converted to their formats.

All of them are stored in one cache folder: ``SPECDEC_CACHE``, by default ``~/.cache/specdec``.
``specdec rivals install NAME`` creates an environment; a model is converted at its first use.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec.errors import UserError
from specdec.files import cache_dir

_WORKERS = Path(__file__).parent / "workers"
_DONE = "specdec.json"  # written last: a folder without it is incomplete
_LAST_LINES = 400  # characters of a failed program's output that a message shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime and how it is installed.

    Attributes:
        packages: pip requirements of the environment that decodes.
        converter: pip requirements of the environment that converts models; empty if the decoding
            environment converts them, too.
        unwanted: packages that pip installs with the converter's, which are uninstalled again.
        worker, convert: scripts in ``workers/``: one decodes, one converts a model folder.
        sees_torch: whether the converter also imports torch and transformers of this environment.
        dtypes: supported ``model.dtype`` -> settings that the worker receives for it.
    """

    title: str
    packages: tuple[str, ...]
    worker: str
    convert: str
    converter: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    sees_torch: bool = False
    dtypes: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"float32": {}})


RUNTIMES: Mapping[str, Runtime] = {
    "ort": Runtime(
        title="ONNX Runtime GenAI",
        packages=("onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0"),
        worker="decode_ort.py",
        convert="convert_ort.py",
        sees_torch=True,
    ),
    "openvino": Runtime(
        title="OpenVINO GenAI",
        packages=("openvino-genai==2026.4.1.0",),
        worker="decode_openvino.py",
        convert="convert_openvino.py",
        converter=("torch==2.13.0", "optimum-intel==2.2.0"),
        # Language models do without it, and a build that is not torch's breaks transformers.
        unwanted=("torchvision",),
        dtypes={"float32": {"precision": "f32"}, "bfloat16": {"precision": "bf16"}},
    ),
}


def rivals_dir() -> Path:
    return cache_dir() / "rivals"


def python_of(name: str, *, converter: bool = False) -> Path:
    """Returns the interpreter of a runtime's environment; ``UserError`` if it is not installed."""
    runtime = RUNTIMES[name]
    kind = "converter" if converter and runtime.converter else "run"
    folder = rivals_dir() / f"{name}-{kind}"
    if _read(folder / _DONE) != _contents(runtime, kind):
        raise UserError(
            f"{runtime.title} is not installed: run `specdec rivals install {name}`, or leave its"
            " rows out"
        )
    return folder / "bin" / "python"


def install(name: str, note: Callable[[str], None]) -> None:
    """Makes the environments of a runtime; those that exist already are kept."""
    runtime = RUNTIMES[name]
    for kind in ("run", "converter") if runtime.converter else ("run",):
        folder, packages = rivals_dir() / f"{name}-{kind}", _packages(runtime, kind)
        if _read(folder / _DONE) == _contents(runtime, kind):
            note(f"{folder} is installed")
            continue
        note(f"installing {', '.join(packages)} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        base = getattr(sys, "_base_executable", sys.executable)
        _run([base, "-m", "venv", str(folder)], f"a Python environment for {runtime.title}")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "-q", *packages], f"{runtime.title} (pip)")
        if kind == "converter" and runtime.unwanted:
            _run([*pip, "uninstall", "-q", "-y", *runtime.unwanted], f"{runtime.title} (pip)")
        (folder / _DONE).write_text(json.dumps(_contents(runtime, kind)) + "\n")


def converted(name: str, model: Path, note: Callable[[str], None] = lambda _: None) -> Path:
    """Returns a Hugging Face model's folder in a runtime's format; converts it on first use."""
    runtime = RUNTIMES[name]
    folder = rivals_dir() / "models" / f"{name}-{_fingerprint(model, runtime)}"
    if (folder / _DONE).is_file():
        return folder
    note(f"converting {model} for {runtime.title}")
    python = python_of(name, converter=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Appended, so that the environment's own packages come first.
    sites = [sysconfig.get_path("purelib")] if runtime.sees_torch else []
    words = [str(python), str(_WORKERS / runtime.convert), str(model), str(folder), *sites]
    _run(words, f"{model}, which {runtime.title} could not convert")
    (folder / _DONE).write_text(json.dumps({"model": str(model)}) + "\n")
    return folder


def worker_command(name: str) -> list[str]:
    return [str(python_of(name)), str(_WORKERS / RUNTIMES[name].worker)]


def _packages(runtime: Runtime, kind: str) -> tuple[str, ...]:
    return runtime.packages if kind == "run" else runtime.converter


def _contents(runtime: Runtime, kind: str) -> dict[str, list[str]]:
    """Returns what is installed in an environment; one with other contents is made again."""
    contents = {"packages": list(_packages(runtime, kind))}
    if kind == "converter" and runtime.unwanted:
        contents["without"] = list(runtime.unwanted)
    return contents


def _fingerprint(model: Path, runtime: Runtime) -> str:
    """Returns a digest of the model's files, the runtime's versions and the conversion script."""
    files = sorted(p for p in model.iterdir() if p.suffix in (".json", ".safetensors"))
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    script = (_WORKERS / runtime.convert).read_text()
    parts = [str(model.resolve()), stats, runtime.packages, runtime.converter, script]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _run(words: Sequence[str], what: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(  # noqa: S603 - words of our own
        words, capture_output=True, text=True, errors="replace", env=environment, check=False
    )
    if done.returncode:
        end = " ".join((done.stdout + done.stderr).split())[-_LAST_LINES:]
        raise UserError(f"cannot make {what}: {end}")
