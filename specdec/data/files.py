import gzip
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from specdec.errors import UserError
from specdec.files import parse_json

DATA_VARIABLE = "SPECDEC_DATA"

FIELD = re.compile(r"\{([A-Za-z_][\w.-]*)\}")


def data_folder(*, name: str, places: str) -> Path:
    """Returns the folder of data sets, which SPECDEC_DATA names; the arguments are for messages."""
    value = os.environ.get(DATA_VARIABLE, "")
    folder = Path(value).expanduser()
    if value and folder.is_dir():
        return folder
    problem = f"the folder {value!r} does not exist" if value else "no folder of data sets is named"
    raise UserError(
        f"data={name}: {problem}; set {DATA_VARIABLE} to a folder that holds {places}, or use"
        " data=stdlib, which needs no files"
    )


def find_file(folder: Path, name: str) -> Path | None:
    """Finds a file, or its .gz, or a folder if the name ends in "/"; None if it is missing."""
    if name.endswith("/"):
        return folder / name if (folder / name).is_dir() else None
    return next(filter(Path.is_file, (folder / name, folder / f"{name}.gz")), None)


@contextmanager
def open_text(path: Path, form: str = "text") -> Iterator[IO[str]]:
    if not path.is_file():
        raise UserError(f"{str(path)!r} is not a file: name an existing one")
    try:
        with path.open("rb") as stream:
            compressed = stream.read(2) == b"\x1f\x8b"
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if compressed
            else path.open(encoding="utf-8-sig") as text
        ):
            yield text
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}); it must be UTF-8 {form}, gzip or plain"
        ) from error


def read_text(path: Path) -> str:
    with open_text(path) as stream:
        return stream.read()


def read_json(path: Path) -> Any:
    try:
        return parse_json(read_text(path))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"{str(path)!r} is not usable JSON ({error}); correct the file or copy it again"
        ) from error


def read_json_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{str(path)!r} is not a JSON object; correct the file or copy it again")
    return value


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path, "JSON lines") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{str(path)!r} line {number}"
            try:
                record = parse_json(line)
            except ValueError as error:
                raise UserError(
                    f"{where} is not JSON ({error}); each line must be one object: correct or"
                    " remove this line"
                ) from error
            if not isinstance(record, dict):
                raise UserError(
                    f"{where} is of type {type(record).__name__}; each line must be an object,"
                    ' such as {"prompt": "..."}'
                )
            yield number, record


def text_field(record: dict[str, Any], field: str, *, where: str, hint: str) -> str:
    """Returns the text of a record's field; dots in its name descend into mappings and lists.
    A missing, blank or non-text field raises UserError with ``where`` and ``hint`` in its message.
    """
    value: Any = record
    for key in field.split("."):
        try:
            value = value[int(key) if isinstance(value, list) and key.isdigit() else key]
        except (LookupError, TypeError):
            raise UserError(
                f"{where} has no field {field!r}; its fields are"
                f" {', '.join(sorted(map(str, record)))} ({hint})"
            ) from None
    if not isinstance(value, str):
        raise UserError(
            f"field {field!r} of {where} is of type {type(value).__name__}, not text;"
            f" {hint} (lists by index: turns.0)"
        )
    if not value.strip():
        raise UserError(
            f"field {field!r} of {where} is an empty prompt; remove the record or fill it"
        )
    return value


def fill(template: str, record: dict[str, Any], *, where: str, hint: str) -> str:
    return FIELD.sub(lambda m: text_field(record, m[1], where=where, hint=hint), template)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
