"""Readers of file formats.

A reader takes a path and a subset and yields ``DataRecord``s in the order of the set. Records of
other subsets are skipped but counted: random draws are keyed by the index, which therefore must not
depend on ``data.subset``. Formats without subsets ignore it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from specdec.data.files import find_file, open_text, read_json, read_records, read_text
from specdec.data.stdlib import function_heads
from specdec.errors import UserError


@dataclass(frozen=True, slots=True)
class DataRecord:
    """One record.

    Attributes:
        index: position in the whole set, from 0.
        where: file and line, for messages ("question.jsonl line 3").
        fields: contents.
    """

    index: int
    where: str
    fields: dict[str, Any]


Reader = Callable[[Path, str | None], Iterator[DataRecord]]


def json_lines(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    for index, (number, fields) in enumerate(read_records(path)):
        yield DataRecord(index, f"{path.name} line {number}", fields)


def json_array(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    loaded = read_json(path)
    if not isinstance(loaded, list):
        raise UserError(f"{str(path)!r} must be one JSON array, but is a {type(loaded).__name__}")
    for index, fields in enumerate(loaded):
        where = f"{path.name} item {index}"
        if not isinstance(fields, dict):
            raise UserError(f"{where} is a {type(fields).__name__}, not an object")
        yield DataRecord(index, where, fields)


def text_lines(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    """Yields each line as the field ``text``."""
    for index, line in enumerate(read_text(path).splitlines()):
        yield DataRecord(index, f"{path.name} line {index + 1}", {"text": line})


def paragraphs(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    """Yields each paragraph, separated by blank lines, as the field ``text``."""
    numbered = enumerate(read_text(path).splitlines(), start=1)
    blocks = groupby(numbered, lambda line: bool(line[1].strip()))
    texts = (list(lines) for is_text, lines in blocks if is_text)
    for index, lines in enumerate(texts):
        text = "\n".join(line for _, line in lines)
        yield DataRecord(index, f"{path.name} line {lines[0][0]}", {"text": text})


def standard_library(_path: Path, _subset: str | None) -> Iterator[DataRecord]:
    """Yields function heads of the running Python's standard library as the field ``text``."""
    for index, head in enumerate(function_heads()):
        yield DataRecord(index, head.place, {"text": head.text})


def instructions(path: Path, _subset: str | None) -> Iterator[DataRecord]:
    """Reads Alpaca's array; ``text`` is the instruction, followed by its input if it has one."""
    for record in json_array(path, None):
        parts = [str(record.fields.get(key) or "") for key in ("instruction", "input")]
        yield DataRecord(record.index, record.where, {"text": "\n\n".join(p for p in parts if p)})


def by_category(groups: dict[str, tuple[str, ...]]) -> Reader:
    """Makes a reader of JSON lines; ``groups`` maps a subset to the values of its ``category``."""

    def read(path: Path, subset: str | None) -> Iterator[DataRecord]:
        categories = None if subset is None else groups[subset]
        for record in json_lines(path, None):
            if categories is None or record.fields.get("category") in categories:
                yield record

    return read


def multiple_choice(path: Path, subset: str | None) -> Iterator[DataRecord]:
    """Reads MMLU's folder: a CSV per subject without header, of question, four choices, answer."""
    index = 0
    for subject, file in _subjects(path, subset):
        with open_text(file) as stream:
            for number, row in enumerate(csv.reader(stream), start=1):
                where = f"{file.name} record {number}"
                if len(row) != 6:
                    raise UserError(f"{where} has {len(row)} columns, not question, A-D, answer")
                if subset in (None, subject):
                    yield DataRecord(index, where, dict(zip(_COLUMNS, row, strict=True)))
                index += 1


_COLUMNS = ("question", "A", "B", "C", "D", "answer")


def _subjects(folder: Path, subset: str | None) -> list[tuple[str, Path]]:
    files = sorted(folder.glob("*_test.csv*"))
    named = [(path.name.partition("_test.csv")[0], path) for path in files]
    if subset is not None and subset not in [name for name, _ in named]:
        raise UserError(
            f"data.subset={subset!r} is not a subject in {str(folder)!r}; it has"
            f" {', '.join(name for name, _ in named) or 'no *_test.csv files'}"
        )
    return named


def books(titles: dict[str, str]) -> Reader:
    """Makes a reader of a folder of Project Gutenberg texts, without their headers and footers.

    ``titles`` maps file names without suffix to titles, in the order of the set.
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
