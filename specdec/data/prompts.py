"""Prompts: loading them, checking quickly that they can be loaded, fitting them into a context."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specdec.data.datasets import DEFAULT_FIELD, FILE_SETS, require_known
from specdec.data.files import (
    DATA_VARIABLE,
    data_folder,
    find_file,
    read_records,
    read_text,
    text_field,
)
from specdec.data.stdlib import function_heads
from specdec.errors import UserError

_ID_BLOCK = 1_000_000  # ids of set number s in ``mixed`` start at s * _ID_BLOCK


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        id: its index in the data set, whatever limit or order is asked for; keys its randomness.
            In ``mixed``: 1,000,000 times the set's number plus the index in that set.
        text: the text, template applied.
        name: short and unique in the data set ("humaneval/17").
        source: where it comes from ("json/decoder.py:JSONDecoder.decode", "line 3").
    """

    id: int
    text: str
    name: str
    source: str


class Tokenizer(Protocol):
    """What is needed of a tokenizer here."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...


def load_prompts(
    *,
    name: str,
    limit: int | None = None,
    path: str | Path | None = None,
    field: str | None = None,
    data_dir: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    seed: int | None = None,
) -> list[Prompt]:
    """Loads the prompts of a data set.

    Line breaks at the end are cut off, but for files of the user's own: byte-level tokenizers join
    a line break with the indentation behind it, so a prompt that ends in one says that no
    indentation follows.

    Args:
        name: one of ``DATASETS``.
        limit: at most so many; None for all.
        path: the file of ``jsonl`` and ``text``.
        field: the text's field of ``jsonl`` (default "prompt"; dots go deeper).
        data_dir: folder of data sets; None for the one that SPECDEC_DATA names.
        tokenizer: where given, prompts without a token are refused.
        seed: None for the data set's own order; a number shuffles it first, so that a limit
            takes a sample. Ids do not change. Not the seed of decoding, which must not choose
            the prompts.

    Raises:
        UserError: unknown set, missing file or folder, unreadable record, empty prompt.
    """
    _check_options(name, limit=limit, path=path, field=field)
    prompts = list(_prompts(name, path=path, field=field, data_dir=data_dir))
    if not prompts:
        raise UserError(f"data={name} has no prompts{f' in {str(path)!r}' if path else ''}")
    if seed is not None:
        random.Random(seed).shuffle(prompts)  # noqa: S311 - order of data, not of decoding
    prompts = prompts[:limit]
    if name not in ("jsonl", "text"):
        prompts = [replace(p, text=p.text.rstrip("\n")) for p in prompts]
    if tokenizer is not None:
        for prompt in prompts:
            if not tokenizer.encode(prompt.text):
                raise UserError(f"prompt {prompt.name} ({prompt.source}) has no tokens; remove it")
    return prompts


def check_data(
    name: str,
    path: str | Path | None = None,
    field: str | None = None,
    *,
    data_dir: str | Path | None = None,
) -> None:
    """Checks within milliseconds that ``load_prompts`` will find its file and text.

    Reads the first record only; a later bad line is reported by ``load_prompts``.

    Raises:
        UserError: as ``load_prompts``.
    """
    _check_options(name, limit=None, path=path, field=field)
    if name in ("stdlib", "mixed"):
        if name == "mixed" and data_dir is not None:
            data_folder(data_dir, name=name, places="any of " + ", ".join(FILE_SETS))
        return
    if next(_prompts(name, path=path, field=field, data_dir=data_dir), None) is None:
        raise UserError(f"data={name} has no prompts{f' in {str(path)!r}' if path else ''}")


def fit_prompt(
    tokens: npt.ArrayLike, *, max_len: int, truncation: str = "left", label: str = "prompt"
) -> tuple[npt.NDArray[np.int64], int]:
    """Makes a tokenised prompt fit.

    Args:
        tokens: int[T].
        max_len: most tokens allowed: the model's positions minus ``max_new_tokens``.
        truncation: "left" drops the oldest tokens, "error" refuses.
        label: the prompt's name, for the message.

    Returns:
        int64[min(T, max_len)] and the number of tokens dropped.

    Raises:
        UserError: the prompt is too long under "error", has no tokens, or nothing would be left.
        ValueError: unknown ``truncation``.
    """
    if truncation not in ("left", "error"):
        raise ValueError(f"truncation={truncation!r} is unknown: use 'left' or 'error'")
    row = np.asarray(tokens, np.int64)
    if row.ndim != 1 or not len(row):
        raise UserError(f"{label} has no tokens; give at least one (such as the BOS token)")
    if max_len < 1:
        raise UserError(
            f"max_new_tokens leaves no room for {label}: {max_len} positions remain of the model's"
            " context; lower max_new_tokens"
        )
    cut = max(0, len(row) - max_len)
    if cut and truncation == "error":
        raise UserError(
            f"{label} has {len(row)} tokens but only {max_len} fit beside max_new_tokens; shorten"
            " it, lower max_new_tokens, or use data.truncation=left to drop its oldest tokens"
        )
    return row[cut:].copy(), cut


def _check_options(
    name: str, *, limit: int | None, path: str | Path | None, field: str | None
) -> None:
    require_known(name)
    if limit is not None and limit < 1:
        raise UserError(f"data.limit={limit} must be at least 1 (leave it out for all prompts)")
    if name in ("jsonl", "text"):
        if not path:
            raise UserError(f"data={name} needs data.path=FILE, the file to read prompts from")
        if not Path(path).expanduser().is_file():
            raise UserError(f"data.path={str(path)!r} is not a file; name an existing one")
    elif path:
        raise UserError(
            f"data.path={str(path)!r} is not used by data={name}; use data=jsonl or data=text for"
            " a file of your own"
        )
    if field is not None and name != "jsonl":
        raise UserError(f"data.field={field!r} is not used by data={name}, only by data=jsonl")


def _prompts(
    name: str,
    *,
    path: str | Path | None = None,
    field: str | None = None,
    data_dir: str | Path | None = None,
) -> Iterator[Prompt]:
    if name == "stdlib":
        return _from_stdlib()
    if name == "mixed":
        return _mixed(data_dir)
    if name == "jsonl":
        assert path is not None
        return _from_records(name, Path(path).expanduser(), field or DEFAULT_FIELD, "{text}")
    if name == "text":
        assert path is not None
        return _from_paragraphs(Path(path).expanduser())
    entry = FILE_SETS[name]
    folder = data_folder(data_dir, name=name, places=entry.places)
    found = find_file(folder, entry.files)
    if found is None:
        raise UserError(
            f"data={name}: {str(folder)!r} holds no {entry.places}; put the file there or set"
            f" {DATA_VARIABLE} to the folder that has it (data=stdlib needs no files)"
        )
    return _from_records(name, found, entry.field, entry.template)


def _from_records(name: str, path: Path, field: str, template: str) -> Iterator[Prompt]:
    for index, (number, record) in enumerate(read_records(path)):
        text = text_field(record, field, path=path, number=number)
        yield Prompt(
            id=index,
            text=template.replace("{text}", text),
            name=f"{name}/{index}",
            source=f"{path.name} line {number}",
        )


def _from_paragraphs(path: Path) -> Iterator[Prompt]:
    paragraphs, start = [], 0
    lines = read_text(path).splitlines()
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            start = start or number
        elif start:
            paragraphs.append((start, "\n".join(lines[start - 1 : number - 1])))
            start = 0
    for index, (line_number, text) in enumerate(paragraphs):
        source = f"{path.name} line {line_number}"
        yield Prompt(id=index, text=text, name=f"text/{index}", source=source)


def _from_stdlib() -> Iterator[Prompt]:
    for index, head in enumerate(function_heads()):
        yield Prompt(id=index, text=head.text, name=f"stdlib/{index}", source=head.place)


def _mixed(data_dir: str | Path | None) -> Iterator[Prompt]:
    sets = [_from_stdlib()]
    numbers = [0]
    for number, (name, entry) in enumerate(FILE_SETS.items(), start=1):
        try:
            folder = data_folder(data_dir, name=name, places=entry.places)
        except UserError:
            if data_dir is not None:  # a folder that was asked for must exist
                raise
            break
        if find_file(folder, entry.files) is not None:
            sets.append(_prompts(name, data_dir=data_dir))
            numbers.append(number)
    while sets:
        for each, number in list(zip(sets, numbers, strict=True)):
            prompt = next(each, None)
            if prompt is None:
                sets.remove(each)
                numbers.remove(number)
            else:
                yield replace(prompt, id=number * _ID_BLOCK + prompt.id)
