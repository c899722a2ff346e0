"""Finding and reading data files: gzip or not, JSON lines or text, with errors that help."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from specdec.errors import UserError

DATA_VARIABLE = "SPECDEC_DATA"
"""Environment variable that names the folder of data sets."""


def data_folder(data_dir: str | Path | None, *, name: str, places: str) -> Path:
    """The folder of data sets.

    Args:
        data_dir: given folder; None for the one that SPECDEC_DATA names.
        name: the data set it is wanted for.
        places: where the data set's file belongs inside it.

    Raises:
        UserError: no folder is named, or it does not exist.
    """
    value = str(data_dir) if data_dir is not None else os.environ.get(DATA_VARIABLE, "")
    if not value:
        raise UserError(
            f"data={name} needs a folder of data sets and none is named: set {DATA_VARIABLE} to a"
            f" folder that holds {places}, or use data=stdlib, which needs no files"
        )
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"data={name}: the folder {value!r} does not exist; set {DATA_VARIABLE} to a folder"
            f" that holds {places}, or use data=stdlib, which needs no files"
        )
    return folder


def find_file(folder: Path, candidates: tuple[str, ...]) -> Path | None:
    """The first of ``candidates`` (relative, each also with .gz) that is a file, or None."""
    for candidate in candidates:
        for path in (folder / candidate, folder / (candidate + ".gz")):
            if path.is_file():
                return path
    return None


def open_text(path: Path) -> IO[str]:
    """Opens UTF-8 text, compressed or not (told by its first bytes, not its name)."""
    with path.open("rb") as stream:
        compressed = stream.read(2) == b"\x1f\x8b"
    if compressed:
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def read_text(path: Path) -> str:
    """The whole file.

    Raises:
        UserError: it cannot be read or is not UTF-8 text.
    """
    try:
        with open_text(path) as stream:
            return stream.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}); it must be UTF-8 text, gzip or plain"
        ) from error


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) of a JSON-lines file; blank lines are skipped.

    Raises:
        UserError: a line is not a JSON object, or the file cannot be read.
    """
    try:
        with open_text(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, _parse(line, path, number)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}); it must be UTF-8 JSON lines, gzip or plain"
        ) from error


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{str(path)!r} line {number} is not JSON ({error.msg}); each line must be one object"
        ) from error
    if not isinstance(record, dict):
        raise UserError(
            f"{str(path)!r} line {number} is a {type(record).__name__}; each line must be one"
            ' object, such as {"prompt": "..."}'
        )
    return record


def text_field(record: dict[str, Any], field: str, *, path: Path, number: int) -> str:
    """A record's text; ``field`` may go deeper with dots and list indices ("turns.0").

    Raises:
        UserError: the field is missing, not text, or blank.
    """
    value: Any = record
    for key in field.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise UserError(
                f"{str(path)!r} line {number} has no field {field!r}; its fields are"
                f" {', '.join(sorted(map(str, record)))} (choose one with data.field)"
            )
    if not isinstance(value, str):
        raise UserError(
            f"field {field!r} of {str(path)!r} line {number} is a {type(value).__name__}, not"
            " text; choose a text field with data.field (lists by index: turns.0)"
        )
    if not value.strip():
        raise UserError(
            f"field {field!r} of {str(path)!r} line {number} is an empty prompt; remove the line"
            " or fill it"
        )
    return value
