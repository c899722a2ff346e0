"""Writes result files atomically; reads JSON and YAML with errors that say what is wrong."""

import errno
import io
import json
import math
import os
import sys
import zipfile
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import yaml

from specdec.errors import UserError


def cache_dir() -> Path:
    return Path(os.environ.get("SPECDEC_CACHE") or "~/.cache/specdec").expanduser()


def write_bytes(path: str | Path, data: bytes) -> Path:
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
    return write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> Path:
    return write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Converts numpy scalars and arrays, enums, paths, sets and tuples to JSON types; raises
    ValueError for NaN and infinity, since undefined metrics must be None.
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


def flatten(config: Any, prefix: str = "", *, whole: Collection[str] = ()) -> dict[str, Any]:
    """Flattens nested mappings to keys "prefix.a.b"; mappings at keys in ``whole`` are kept."""
    if not isinstance(config, dict) or not config or prefix.rpartition(".")[2] in whole:
        return {prefix: config} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key), whole=whole)
    return flat


# Reading.


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; raises a ValueError that says why, and where, the text cannot be parsed."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(why_unreadable(error)) from error


def read_json(path: Path, kind: type = dict, *, remedy: str = "delete it and run it again") -> Any:
    """Returns the JSON object, or value of another ``kind``, in a file; None without the file."""
    if not path.is_file():
        return None
    try:
        value = parse_json(path.read_bytes())
        if not isinstance(value, kind):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {remedy}") from error
    return value


def parse_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (*UNREADABLE, AttributeError) as error:  # the last is PyYAML's, of a malformed date
        raise ValueError(why_unreadable(error)) from error


UNREADABLE = (ValueError, RecursionError, yaml.YAMLError)
"""Exceptions that json and yaml raise for a text that they cannot parse."""

NOT_ARRAYS = (  # exceptions that numpy raises for a file that is not an archive of arrays
    *(OSError, EOFError, ValueError, KeyError, AttributeError, TypeError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError),
)


def why_unreadable(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8 text"
    if isinstance(error, AttributeError):  # PyYAML's
        return "it has a malformed date"
    if isinstance(error, json.JSONDecodeError):
        line = "" if error.lineno == 1 else f"line {error.lineno} "
        return f"{error.msg} at {line}column {error.colno}"
    text = " ".join(str(error).partition("\n")[0].split())
    if "integer string conversion" in text:
        return f"it has a number of more than {sys.get_int_max_str_digits()} digits"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return text or type(error).__name__


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFormat:
    """A file format: an ``.npz`` with the named ``arrays`` and ``head``, a JSON text with metadata.

    ``head`` contains ``name`` and ``version``. Error messages call such a file ``what`` and end
    with advice: ``missing`` if it does not exist, ``other`` if it is no archive, else ``again``.
    """

    name: str
    version: int
    arrays: tuple[str, ...]
    what: str
    missing: str
    other: str
    again: str

    def write(self, path: str | Path, head: Mapping[str, Any], arrays: Mapping[str, Any]) -> Path:
        head = {"format": self.name, "version": self.version, **head}
        stream = io.BytesIO()
        np.savez_compressed(stream, head=np.array(json.dumps(plain(head))), **arrays)
        return write_bytes(path, stream.getvalue())

    def read(self, path: str | Path, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns ``head`` and the arrays by name; ``where`` names the file in error messages."""
        try:
            with np.load(Path(path).expanduser(), allow_pickle=False) as file:
                head = parse_json(str(file["head"]))
                arrays = {key: file[key] for key in self.arrays}
        except FileNotFoundError as error:
            raise UserError(f"{where}: no such file; {self.missing}") from error
        except NOT_ARRAYS as error:
            raise UserError(f"{where} is not {self.what}; {self.other}") from error
        own = isinstance(head, dict) and (head.get("format"), head.get("version"))
        if own != (self.name, self.version):
            raise UserError(f"{where} is not a {self.name} of version {self.version}; {self.again}")
        return head, arrays
