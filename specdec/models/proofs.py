"""Proofs of row counts kept on disk, below ``SPECDEC_CACHE`` (default ``~/.cache/specdec``).

A proof belongs to everything that may decide which kernel runs or what the kernel is: the setting
and the operator (see ``row_counts``), the versions of torch and transformers, the processor or GPU,
the environment variables of the numerical libraries, and the text of this library. One small file
per proof is named after a digest of these. A file that cannot be read or written is ignored: the
proof is then made again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import transformers

from specdec.files import cache_dir, parse_json, write_json

_LIBRARIES = ("ATEN_", "CUBLAS", "DNNL_", "KMP_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "TORCH_")


def stored_counts(key: Hashable, device: torch.device) -> tuple[int, ...] | None:
    """The counts proved for a key; None if there is no proof on disk.

    Args:
        key: compared by its ``repr``, which must be the same in every process.
        device: where the operator runs.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = parse_json(_path(key, device).read_bytes())
        if found["key"] == repr(key):
            return tuple(int(count) for count in found["counts"])
    return None


def store_counts(key: Hashable, device: torch.device, counts: tuple[int, ...]) -> None:
    """Keeps a proof. Arguments as for ``stored_counts``."""
    proof = {"key": repr(key), "counts": list(counts), "place": _place(device)}
    with suppress(OSError):
        write_json(_path(key, device), proof)


def _path(key: Hashable, device: torch.device) -> Path:
    text = f"{_text_of_library()}\n{_place(device)}\n{key!r}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return cache_dir() / "row_counts" / f"{digest[:32]}.json"


def _place(device: torch.device) -> str:
    """What runs the operators: libraries, processor or GPU, and variables that steer them."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    capability = torch.backends.cpu.get_cpu_capability()
    steering = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_LIBRARIES))
    return " | ".join([torch.__version__, transformers.__version__, chip, capability, *steering])


@cache
def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def _text_of_library() -> str:
    """A digest of all modules of this library."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
