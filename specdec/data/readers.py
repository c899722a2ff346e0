"""Readers of file formats.

A reader takes a path and a subset and yields ``DataRecord``s in the order of the set. Records of
other subsets are skipped but counted: random numbers depend on a record's index, which therefore
must not depend on ``data.subset``. Formats without subsets ignore the argument.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from specdec.data.files import find_file, open_text, read_json, read_records, read_text
from specdec.data.stdlib import function_heads
from specdec.errors import UserError

_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True, slots=True)
class DataRecord:
    index: int  # position in the whole set, from 0
    where: str  # file and line, for messages ("question.jsonl line 3")
    fields: dict[str, Any]


Reader = Callable[[Path, str | None], Iterator[DataRecord]]


def json_lines(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    for index, (number, fields) in enumerate(read_records(path)):
        yield DataRecord(index, f"{path.name} line {number}", fields)


def json_array(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    loaded = read_json(path)
    if not isinstance(loaded, list):
        raise UserError(
            f"{str(path)!r} must be one JSON array, but is of type {type(loaded).__name__}"
        )
    for index, fields in enumerate(loaded):
        where = f"{path.name} item {index}"
        if not isinstance(fields, dict):
            raise UserError(f"{where} is of type {type(fields).__name__}, not an object")
        yield DataRecord(index, where, fields)


# Texts without keys have the field ``text``.


def text_lines(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    for index, line in enumerate(read_text(path).splitlines()):
        yield DataRecord(index, f"{path.name} line {index + 1}", {"text": line})


def paragraphs(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    numbered = enumerate(read_text(path).splitlines(), start=1)
    blocks = groupby(numbered, lambda line: bool(line[1].strip()))
    for index, lines in enumerate(list(lines) for is_text, lines in blocks if is_text):
        text = "\n".join(line for _, line in lines)
        yield DataRecord(index, f"{path.name} line {lines[0][0]}", {"text": text})


def standard_library(_path: Path, _subset: str | None) -> Iterator[DataRecord]:
    for index, head in enumerate(function_heads()):
        yield DataRecord(index, head.place, {"text": head.text})


def instructions(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    for record in json_array(path, None):
        parts = (str(record.fields.get(key) or "") for key in ("instruction", "input"))
        yield replace(record, fields={"text": "\n\n".join(filter(None, parts))})


def by_category(groups: dict[str, tuple[str, ...]]) -> Reader:
    def read(path: Path, subset: str | None) -> Iterator[DataRecord]:
        categories = None if subset is None else groups[subset]
        for record in json_lines(path, None):
            if categories is None or record.fields.get("category") in categories:
                yield record

    return read


def speed_bench(path: Path, subset: str | None) -> Iterator[DataRecord]:
    """Reads the user's copy of SPEED-Bench as JSON lines; ``subset`` is one of its categories.

    Raises:
        UserError: a row is a placeholder, which the public files have for about half of the data.
    """
    for record in json_lines(path, None):
        if subset in (None, record.fields.get("category")):
            if any(_PLACEHOLDER in str(turn) for turn in record.fields.get("turns") or ()):
                raise UserError(
                    f"{record.where} is a placeholder of SPEED-Bench, not a prompt: fill the file"
                    " with its prepare_data.py"
                )
            yield record


def multiple_choice(folder: Path, subset: str | None) -> Iterator[DataRecord]:
    files = {p.name.partition("_test.csv")[0]: p for p in sorted(folder.glob("*_test.csv*"))}
    if subset is not None and subset not in files:
        raise UserError(
            f"data.subset={subset!r} is not a subject in {str(folder)!r}; it has"
            f" {', '.join(files) or 'no *_test.csv files'}"
        )
    columns, index = ("question", "A", "B", "C", "D", "answer"), 0
    for subject, file in files.items():
        with open_text(file) as stream:
            for number, row in enumerate(csv.reader(stream), start=1):
                where = f"{file.name} record {number}"
                if len(row) != len(columns):
                    raise UserError(f"{where} has {len(row)} columns, not question, A-D, answer")
                if subset in (None, subject):
                    yield DataRecord(index, where, dict(zip(columns, row, strict=True)))
                index += 1


def books(titles: dict[str, str]) -> Reader:
    """Makes a reader of Project Gutenberg texts that strips their headers and footers; ``titles``
    maps file names without suffix to titles, in the order of the set.
    """

    def read(folder: Path, subset: str | None) -> Iterator[DataRecord]:
        for index, (name, title) in enumerate(titles.items()):
            if subset not in (None, name):
                continue
            path = find_file(folder, f"{name}.txt")
            if path is None:
                raise UserError(
                    f"{str(folder)!r} has no {name}.txt[.gz] ({title}): put the book there, or"
                    " choose an existing one with data.subset=NAME"
                )
            yield DataRecord(index, path.name, {"text": _body(path), "title": title})

    return read


def _body(path: Path) -> str:
    text = read_text(path).replace("\r\n", "\n")
    start, end = text.find("*** START OF"), text.find("*** END OF")
    if start < 0 or end < start:
        raise UserError(f"{str(path)!r} lacks the lines '*** START OF' and '*** END OF'")
    return text[text.index("\n", start) : end].strip()
