"""Sessions in which an agent edits files of the standard library, turn by turn.

They are made from held-out modules (``data.stdlib``) without a model: rules apply the edits, so
each turn has a prompt and the completion of a model that follows it. In turns of kind ``rewrite``
the prompt contains the file and the completion is its whole new version; in turns of kind
``resume`` the file occurs only in earlier turns. CRC-32 sums of names determine all choices.
"""

import ast
import builtins
import functools
import keyword
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specdec.data.prompt import DataReader, Prompt
from specdec.data.stdlib import (
    first_line,
    is_held_out,
    parsed,
    python_files,
    read_source,
    stdlib_root,
)
from specdec.errors import UserError

MIN_CHARS, MAX_CHARS = 700, 1500  # smallest and largest size of an edited file
TURNS = 6
KINDS = ("rewrite", "resume")  # values of ``data.subset``


@dataclass(frozen=True, slots=True)
class Turn:
    index: int
    place: str  # piece of a module and number of the turn ("json/tool.py:main turn 1")
    kind: str  # one of ``KINDS``
    prompt: str
    completion: str  # the new version of the file, as written by a model that follows the prompt


class EditPrompts(DataReader):
    def __init__(self, *, subset: str | None = None) -> None:
        self._turns = chosen_turns(subset, "data.subset")

    def prompts(self) -> Iterator[Prompt]:
        for turn in self._turns:
            yield Prompt(turn.index, turn.prompt, f"edits/{turn.index}", turn.place)

    def provenance(self) -> dict[str, object]:
        return edits_provenance()


def chosen_turns(kind: str | None, key: str) -> tuple[Turn, ...]:
    if kind not in (None, *KINDS):
        raise UserError(f"{key}={kind!r} is unknown: choose one of {', '.join(KINDS)}, or null")
    return tuple(turn for turn in edit_turns() if kind in (None, turn.kind))


def edits_provenance() -> dict[str, object]:
    texts = "".join(turn.prompt + turn.completion for turn in edit_turns())
    return {"turns": len(edit_turns()), "crc32": zlib.crc32(texts.encode())}


@functools.cache
def edit_turns() -> tuple[Turn, ...]:
    """Returns the turns of all sessions, ordered by CRC-32 of the file's name to mix modules."""
    files = []
    for relative, path in python_files(stdlib_root()):
        text = read_source(path) if is_held_out(relative) else None
        if text is not None and text.isascii():
            files += [(f"{relative}:{name}", piece) for name, piece in _pieces(text)]
    turns: list[Turn] = []
    for place, text in sorted(files, key=lambda file: (zlib.crc32(file[0].encode()), file[0])):
        session = list(_session(place, text))
        if len(session) == TURNS:
            turns += [
                Turn(len(turns) + number, f"{place} turn {number + 1}", *parts)
                for number, parts in enumerate(session)
            ]
    return tuple(turns)


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yields neighbouring definitions that together make one file: (name of the first, source)."""
    lines, name, parts = text.split("\n"), "", [""]
    for node in parsed(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        source = "\n".join(lines[first_line(node) - 1 : node.end_lineno]) + "\n"
        if len("\n\n".join(parts)) + len(source) > MAX_CHARS:
            name, parts = "", [""]
        if len(source) <= MAX_CHARS:
            name, parts = name or node.name, [*filter(None, parts), source]
        if len(joined := "\n\n".join(parts)) >= MIN_CHARS:
            yield name, joined
            name, parts = "", [""]


def _session(place: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, prompt, completion) of a file's turns; ends early if no edit applies."""
    for number in range(TURNS):
        key = zlib.crc32(f"{place} {number}".encode())
        choice, own = key % len(_EDITS), key // len(_EDITS)
        for edit in (*_EDITS[choice:], *_EDITS[:choice]):
            instruction, new = edit(text, own) or ("", text)
            if new != text and parsed(new).body:
                break
        else:
            return
        kind = KINDS[number > 1 and number % 2]
        head = f"# Task: {instruction}\n# Answer with the whole file, version {number + 2}.\n"
        shown = f"# {place}, version {number + 1}:\n{text}\n" if kind == "rewrite" else ""
        yield kind, f"{shown}{head}# {place}, version {number + 2}:\n", new
        text = new


# Edits: (text, key of their choice) -> instruction and new text; None where there is nothing to do.


def _nodes(text: str, *kinds: type[ast.AST]) -> list[Any]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def _rename(text: str, key: int) -> tuple[str, str] | None:
    nodes = _nodes(text, ast.Name, ast.arg)
    names = Counter(n.id if isinstance(n, ast.Name) else n.arg for n in nodes)
    taken = {*dir(builtins), *keyword.kwlist, "self", "cls"}
    several = sorted(n for n, count in names.items() if count > 1 and n not in taken)
    if not several:
        return None
    old = several[key % len(several)]
    new = f"{old}_{_SUFFIXES[key % len(_SUFFIXES)]}"
    return f"Rename `{old}` to `{new}`.", re.sub(rf"\b{re.escape(old)}\b", new, text)


def _comment(text: str, key: int) -> tuple[str, str] | None:
    lines = text.split("\n")
    starts = sorted({node.lineno for node in _nodes(text, *_SIMPLE)})
    if not starts:
        return None
    at = starts[key % len(starts)] - 1
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    note = _NOTES[key % len(_NOTES)]
    new = "\n".join([*lines[:at], f"{indent}# {note}", *lines[at:]])
    return f"Add the comment '{note}' before line {at + 1}.", new


def _guard(text: str, key: int) -> tuple[str, str] | None:
    functions = [
        (node, names[0])
        for node in _nodes(text, ast.FunctionDef)
        if (names := [a.arg for a in node.args.args if a.arg != "self"])
    ]
    if not functions:
        return None
    function, name = functions[key % len(functions)]
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    lines, at, indent = text.split("\n"), first.lineno - 1, " " * first.col_offset
    check = [f"{indent}if {name} is None:", f"{indent}    raise TypeError('{name} is missing')"]
    task = f"In `{function.name}` raise a TypeError where `{name}` is None."
    return task, "\n".join([*lines[:at], *check, *lines[at:]])


def _without_docstring(text: str, key: int) -> tuple[str, str] | None:
    nodes = _nodes(text, ast.FunctionDef, ast.ClassDef)
    documented = [node for node in nodes if ast.get_docstring(node) and len(node.body) > 1]
    if not documented:
        return None
    node = documented[key % len(documented)]
    lines, docstring = text.split("\n"), node.body[0]
    kept = [*lines[: docstring.lineno - 1], *lines[docstring.end_lineno :]]
    return f"Remove the docstring of `{node.name}`.", "\n".join(kept)


_SIMPLE = (ast.Assign, ast.Return, ast.AugAssign, ast.Raise)
_SUFFIXES = ("value", "item", "arg", "local", "new")
_NOTES = (
    "Checked above.",
    "See the documentation of this module.",
    "May raise an exception, which the caller handles.",
    "Kept for compatibility.",
)
_Edit = Callable[[str, int], tuple[str, str] | None]
_EDITS: tuple[_Edit, ...] = (_rename, _comment, _guard, _without_docstring)
