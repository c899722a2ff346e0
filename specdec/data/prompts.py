"""Loading prompts, and a fast check that they can be loaded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from specdec.data.datasets import (
    DEFAULT_FIELD,
    OWN,
    STDLIB_MESSAGE,
    first_subset,
    holds,
    place_of,
)
from specdec.data.files import fill, read_text, text_field
from specdec.data.hub import hub_records
from specdec.data.prompt import Prompt
from specdec.data.readers import Record, json_lines
from specdec.data.request import Request, check_request
from specdec.data.sets import MIXED, SETS, Hub, Place
from specdec.data.stdlib import function_heads
from specdec.errors import UserError

_ID_BLOCK = 1_000_000  # ids of set number s in ``mixed`` start at s * _ID_BLOCK


class Tokenizer(Protocol):
    """The method of a tokenizer that loading needs."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...


def load_prompts(
    request: Request | None = None, *, tokenizer: Tokenizer | None = None, **keys: Any
) -> list[Prompt]:
    """Loads the prompts of a data set.

    Line breaks at the end of a prompt are removed, except in user files: byte-level tokenizers join
    a line break with the indentation after it, so a final line break would exclude indentation.

    Args:
        request: the data set; None for ``Request(**keys)``.
        tokenizer: refuses prompts without tokens; None checks nothing.
        keys: attributes of ``Request``, such as ``name="humaneval", limit=8``.

    Raises:
        UserError: unknown set, missing file or folder, unreadable record, empty prompt.
    """
    request = request or Request(**keys)
    check_request(request)
    prompts = list(islice(_prompts(request), request.limit))
    if not prompts:
        raise _no_prompts(request)
    if request.reader is None and request.name not in OWN:
        prompts = [replace(p, text=p.text.rstrip("\n")) for p in prompts]
    if tokenizer is not None:
        for prompt in prompts:
            if not tokenizer.encode(prompt.text):
                raise UserError(f"prompt {prompt.name} ({prompt.source}) has no tokens; remove it")
    return prompts


def check_data(request: Request) -> None:
    """Checks within milliseconds that the data set's file exists, by reading its first prompt.

    ``load_prompts`` reports bad records after the first.

    Raises:
        UserError: as ``load_prompts``.
    """
    check_request(request)
    if request.origin == "hub":
        return
    for name in request.sets or [request.name]:
        if request.reader is not None or name not in ("stdlib", "mixed"):
            one = replace(request, name=name, sets=None, sample_seed=None)
            if next(_prompts(one), None) is None:
                raise _no_prompts(one)


def _no_prompts(request: Request) -> UserError:
    where = f" in {str(request.path)!r}" if request.path else ""
    return UserError(f"data={request.name} has no prompts{where}")


def _prompts(request: Request) -> Iterator[Prompt]:
    """The prompts in the requested order, without the limit."""
    if request.name == "mixed" and request.reader is None:
        return _mixed(request)
    prompts = _in_order(request)
    if request.sample_seed is None:
        return prompts
    shuffled = list(prompts)
    random.Random(request.sample_seed).shuffle(shuffled)  # noqa: S311 - order of data, not decoding
    return iter(shuffled)


def _in_order(request: Request) -> Iterator[Prompt]:
    name = request.name
    if request.reader is not None:
        return iter(request.reader.prompts())
    if name == "stdlib":
        return _from_stdlib()
    if name == "jsonl":
        return _from_own_records(request)
    if name == "text":
        return _from_paragraphs(request)
    subset = request.subset or first_subset(name)
    if request.origin == "hub":
        hub = SETS[name].hub
        assert hub is not None, "check_request refuses sets without one"
        return _of_records(name, hub_records(name, hub), hub, subset)
    place, path = place_of(name, subset=subset, data_dir=request.data_dir)
    return _of_records(name, place.read(path, subset), place, subset)


def _of_records(
    name: str, records: Iterator[Record], texts: Place | Hub, subset: str | None
) -> Iterator[Prompt]:
    """Prompts of a benchmark's records."""
    template, message = (
        text.replace("{subset}", subset or "") for text in (texts.template, texts.message)
    )
    hint = f"is this the file of data={name}?"
    for record in records:
        yield Prompt(
            id=record.index,
            text=fill(template, record.fields, where=record.where, hint=hint),
            name=f"{name}/{record.index}",
            source=record.where,
            message=fill(message, record.fields, where=record.where, hint=hint),
        )


def _from_own_records(request: Request) -> Iterator[Prompt]:
    assert request.path is not None, "check_request refuses it"
    path = Path(request.path).expanduser()
    hint = "choose one with data.field"
    for record in json_lines(path, None):
        where = f"{str(path)!r} {record.where.removeprefix(path.name + ' ')}"
        if request.template is not None:
            text = fill(request.template, record.fields, where=where, hint="see data.template")
        else:
            field = request.field or DEFAULT_FIELD
            text = text_field(record.fields, field, where=where, hint=hint)
        yield Prompt(record.index, text, f"jsonl/{record.index}", record.where, text)


def _from_paragraphs(request: Request) -> Iterator[Prompt]:
    assert request.path is not None, "check_request refuses it"
    path, template = Path(request.path).expanduser(), request.template or "{text}"
    paragraphs, start = [], 0
    lines = read_text(path).splitlines()
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            start = start or number
        elif start:
            paragraphs.append((start, "\n".join(lines[start - 1 : number - 1])))
            start = 0
    for index, (line_number, paragraph) in enumerate(paragraphs):
        source = f"{path.name} line {line_number}"
        text = fill(template, {"text": paragraph}, where=source, hint="see data.template")
        yield Prompt(index, text, f"text/{index}", source, text)


def _from_stdlib() -> Iterator[Prompt]:
    for index, head in enumerate(function_heads()):
        message = STDLIB_MESSAGE.replace("{text}", head.text)
        yield Prompt(index, head.text, f"stdlib/{index}", head.place, message)


def _mixed(request: Request) -> Iterator[Prompt]:
    if request.sets:
        names = list(request.sets)
    else:
        names = ["stdlib", *(name for name in MIXED if holds(name, request.data_dir))]
    numbers = {"stdlib": 0, **{name: i for i, name in enumerate(SETS, start=1)}}
    turns = [
        (_ID_BLOCK * numbers[name], _prompts(replace(request, name=name, sets=None)))
        for name in names
    ]
    return chain.from_iterable(_rounds(turns))


def _rounds(turns: list[tuple[int, Iterator[Prompt]]]) -> Iterator[list[Prompt]]:
    """One prompt of each set in turn, until all sets are exhausted."""
    while turns:
        drawn = [(base, rest, next(rest, None)) for base, rest in turns]
        turns = [(base, rest) for base, rest, prompt in drawn if prompt is not None]
        yield [replace(p, id=base + p.id) for base, _, p in drawn if p is not None]
