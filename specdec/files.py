"""Atomic writing of result files: to a temporary name, which is then renamed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Writes a file atomically, creating parent folders. Returns its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    return target


def write_text(path: str | Path, text: str) -> Path:
    """Writes UTF-8 text atomically. Returns its path."""
    return write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> Path:
    """Writes strict JSON atomically (see ``plain``). Returns its path."""
    return write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Converts numpy scalars and arrays, enums, paths, sets and tuples to JSON types.

    Raises:
        ValueError: for NaN or an infinite number; undefined metrics must be None.
        TypeError: for any other type.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be stored as JSON; use None for undefined values")
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, Path):
        return value.as_posix()
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON: {value!r}")
