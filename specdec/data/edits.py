"""Sessions in which an agent edits files of the standard library, turn by turn.

They are made from held-out modules (``data.stdlib``) without downloads and without a model: rules
apply the edits, so each turn has a prompt and the completion of a model that follows it. A session
edits one piece of a module several times. In turns of kind ``rewrite`` the prompt contains the file
and the completion is its whole new version. In turns of kind ``resume`` the prompt does not contain
the file: the agent continues in a new context, as after a summary or in a second attempt, and the
file occurs only in earlier turns.

All choices are keyed by names (CRC-32), so the turns depend on nothing but the Python version.
"""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdec.data.prompt import DataReader, Prompt
from specdec.data.stdlib import is_held_out, python_files, read_source, stdlib_root
from specdec.errors import UserError

MIN_CHARS, MAX_CHARS = 700, 1500
"""Smallest and largest size of an edited file."""
TURNS = 6
KINDS = ("rewrite", "resume")
"""Values of ``data.subset``."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent.

    Attributes:
        place: piece of a module and number of the turn ("json/tool.py:main turn 1").
        kind: one of ``KINDS``.
        completion: the new version of the file, as written by a model that follows the prompt.
    """

    index: int
    place: str
    kind: str
    prompt: str
    completion: str


class EditPrompts(DataReader):
    """The prompts of ``edit_turns``, for real models (``data=edits``)."""

    def __init__(self, *, subset: str | None = None) -> None:
        self._turns = chosen_turns(subset, "data.subset")

    def prompts(self) -> Iterator[Prompt]:
        for turn in self._turns:
            yield Prompt(turn.index, turn.prompt, f"edits/{turn.index}", turn.place)

    def provenance(self) -> dict[str, object]:
        return edits_provenance()


def chosen_turns(kind: str | None, key: str) -> tuple[Turn, ...]:
    """Returns the turns of a kind, or all (None); messages mention the configuration ``key``."""
    if kind not in (None, *KINDS):
        raise UserError(f"{key}={kind!r} is unknown: choose one of {', '.join(KINDS)}, or null")
    return tuple(turn for turn in edit_turns() if kind in (None, turn.kind))


def edits_provenance() -> dict[str, object]:
    """Returns the CRC-32 of the turns' texts, which differ between Python versions."""
    texts = "".join(turn.prompt + turn.completion for turn in edit_turns())
    return {"turns": len(edit_turns()), "crc32": zlib.crc32(texts.encode())}


@functools.cache
def edit_turns() -> tuple[Turn, ...]:
    """Returns all turns; sessions are ordered by CRC-32, so that the first ones mix modules."""
    turns: list[Turn] = []
    for place, text in _files():
        session = list(_session(place, text))
        if len(session) == TURNS:
            turns += [
                Turn(len(turns) + number, f"{place} turn {number + 1}", *parts)
                for number, parts in enumerate(session)
            ]
    return tuple(turns)


def _files() -> list[tuple[str, str]]:
    """Returns (place, source) of pieces of held-out modules."""
    files = []
    for relative, path in python_files(stdlib_root()):
        text = read_source(path) if is_held_out(relative) else None
        if text is not None and text.isascii():
            files += [(f"{relative}:{name}", piece) for name, piece in _pieces(text)]
    return sorted(files, key=lambda file: (zlib.crc32(file[0].encode()), file[0]))


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yields neighbouring definitions of about one file's size: (name of the first, source)."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines, name, parts = text.split("\n"), "", [""]
    for node in module.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        source = "\n".join(lines[first - 1 : node.end_lineno]) + "\n"
        if len("\n\n".join(parts)) + len(source) > MAX_CHARS:
            name, parts = "", [""]
        if len(source) <= MAX_CHARS:
            name, parts = name or node.name, [*filter(None, parts), source]
        if len(joined := "\n\n".join(parts)) >= MIN_CHARS:
            yield name, joined
            name, parts = "", [""]


def _session(place: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, prompt, completion) of each turn; ends early if no edit applies."""
    for number in range(TURNS):
        found = _edited(text, zlib.crc32(f"{place} {number}".encode()))
        if found is None:
            return
        instruction, new = found
        kind = KINDS[number > 1 and number % 2]
        head = f"# Task: {instruction}\n# Answer with the whole file, version {number + 2}.\n"
        shown = f"# {place}, version {number + 1}:\n{text}\n" if kind == "rewrite" else ""
        yield kind, f"{shown}{head}# {place}, version {number + 2}:\n", new
        text = new


def _edited(text: str, key: int) -> tuple[str, str] | None:
    """Returns (instruction, new text) of the first edit that applies, starting at a keyed one."""
    for attempt in range(len(_EDITS)):
        edit = _EDITS[(key + attempt) % len(_EDITS)]
        found = edit(text, key // len(_EDITS))
        if found is not None and found[1] != text and _parses(found[1]):
            return found
    return None


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _rename(text: str, key: int) -> tuple[str, str] | None:
    """Renames a variable or an argument that occurs at least twice."""
    names: dict[str, int] = {}
    for node in ast.walk(ast.parse(text)):
        name = getattr(node, "id", getattr(node, "arg", None))
        if isinstance(name, str) and isinstance(node, ast.Name | ast.arg):
            names[name] = names.get(name, 0) + 1
    taken = {*dir(builtins), *keyword.kwlist, "self", "cls"}
    several = sorted(n for n, count in names.items() if count > 1 and n not in taken)
    if not several:
        return None
    old = several[key % len(several)]
    new = f"{old}_{_SUFFIXES[key % len(_SUFFIXES)]}"
    return f"Rename `{old}` to `{new}`.", re.sub(rf"\b{re.escape(old)}\b", new, text)


def _comment(text: str, key: int) -> tuple[str, str] | None:
    lines = text.split("\n")
    starts = sorted({n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, _SIMPLE)})
    if not starts:
        return None
    at = starts[key % len(starts)] - 1
    line = lines[at]
    indent = line[: len(line) - len(line.lstrip())]
    note = _NOTES[key % len(_NOTES)]
    new = "\n".join([*lines[:at], f"{indent}# {note}", *lines[at:]])
    return f"Add the comment '{note}' before line {at + 1}.", new


def _guard(text: str, key: int) -> tuple[str, str] | None:
    """Adds a check of the first argument at the start of a function."""
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and [a for a in node.args.args if a.arg != "self"]
    ]
    if not functions:
        return None
    function = functions[key % len(functions)]
    name = next(a.arg for a in function.args.args if a.arg != "self")
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    lines = text.split("\n")
    at, indent = first.lineno - 1, " " * first.col_offset
    check = [f"{indent}if {name} is None:", f"{indent}    raise TypeError('{name} is missing')"]
    task = f"In `{function.name}` raise a TypeError where `{name}` is None."
    return task, "\n".join([*lines[:at], *check, *lines[at:]])


def _without_docstring(text: str, key: int) -> tuple[str, str] | None:
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and ast.get_docstring(node)
        and len(node.body) > 1
    ]
    if not found:
        return None
    node = found[key % len(found)]
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
_EDITS: tuple[Callable[[str, int], tuple[str, str] | None], ...] = (
    _rename,
    _comment,
    _guard,
    _without_docstring,
)
