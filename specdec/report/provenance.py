import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdec.files import plain

_PACKAGES = (
    *("specdec-lab", "torch", "transformers", "tokenizers", "safetensors", "numpy"),
    *("hydra-core", "omegaconf"),
)
_SECRET_KEY = re.compile(r"(?i)(^|[._+-])(token|secret|password|passwd|api_?key|credentials?)$")
_SECRET_VALUE = re.compile(r"\b(hf|sk|ghp|github_pat)[_-]\w{16,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)")


def provenance(
    *, command: Sequence[str], config: Mapping[str, Any], extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the information needed to judge or repeat a run, and the entries of ``extra``.

    Only a hash of ``config`` is recorded, and no host name. Paths become relative to the working
    directory or home; values that look like secrets, or whose keys do, are redacted.
    """
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [redact(part) for part in command],
        "config_sha256": _sha256(json.dumps(plain(config), sort_keys=True)),
        "git": _git_state(),
        "versions": versions,
        "hardware": _hardware(),
        **_without_paths(plain(extra or {})),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def cpu_info() -> str:
    """Returns the text of /proc/cpuinfo; "" if it cannot be read."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return ""


def _hardware() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    cpu = re.search(r"^model name\s*:\s*(.+)$", cpu_info(), re.MULTILINE)
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": cpu[1].strip() if cpu else platform.processor(),
        "cores": usable_cpus(),
        "logical_cpus": os.cpu_count(),
        "memory_gib": round(host_memory() / 2**30, 1),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
    if torch is not None:
        cuda, facts["torch_threads"] = torch.cuda, torch.get_num_threads()
        if cuda.is_available():
            facts["gpus"] = [cuda.get_device_name(i) for i in range(cuda.device_count())]
    return facts


def usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def host_memory() -> int:
    """Returns the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _git_state() -> dict[str, Any] | None:
    """Returns revision and state of this package's repository, None without one."""
    revision, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    # A package installed inside another project's repository is not tracked by that repository.
    tracked = _git("ls-files", "--error-unmatch", "provenance.py") is not None
    if revision is None or status is None or not tracked:
        return None
    state: dict[str, Any] = {"revision": revision, "dirty": bool(status)}
    if status:
        state["diff_sha256"] = _sha256(_git("diff", "HEAD") or "")
    return state


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True)  # noqa: S603
        return run.stdout.strip()
    return None


def redact(part: str) -> str:
    """Removes secrets from a command-line argument, and abbreviates local folders."""
    key, equals, _ = part.partition("=")
    if equals and _SECRET_KEY.search(key):
        return f"{key}=<redacted>"
    redacted = _SECRET_VALUE.sub("<redacted>", part)
    for folder, short in ((str(Path.cwd()), "."), (str(Path.home()), "~")):
        # Match whole path components only.
        if folder != "/":
            pattern = rf"(?<![\w.]){re.escape(folder)}(?=/|$|[,\]\s])"
            redacted = re.sub(pattern, short, redacted)
    return redacted


def _without_paths(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    return "<redacted>" if _SECRET_KEY.search(key) else redact(value)
