"""Prompts from held-out modules of the running Python's standard library.

They exist on every machine: a function's imports, signature and docstring, without the body, from
modules on which the bundled models are not trained (``experiments.tiny_family.corpus``).
"""

import ast
import functools
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MIN_CHARS, MAX_CHARS = 200, 600  # shortest and longest prompt


class FunctionHead(NamedTuple):
    place: str  # "json/decoder.py:JSONDecoder.decode"
    text: str  # imports, class line (for a method), signature and docstring; ends in a newline


@functools.cache
def function_heads() -> tuple[FunctionHead, ...]:
    """Returns the function heads of all held-out modules, ordered by CRC-32 of ``place``, so that
    the first few come from many modules.
    """
    heads: dict[str, FunctionHead] = {}
    for relative, path in python_files(stdlib_root()):
        if is_held_out(relative):
            for head in heads_of(read_source(path) or "", relative):
                heads.setdefault(head.text, head)
    order = sorted(heads.values(), key=lambda head: (zlib.crc32(head.place.encode()), head.place))
    return tuple(order)


def parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def heads_of(text: str, relative: str) -> Iterator[FunctionHead]:
    module, lines = parsed(text), text.split("\n")
    for node in module.body:
        owner = node if isinstance(node, ast.ClassDef) else None
        for function in [node] if owner is None else owner.body:
            # A function without statements after its docstring has no body to generate.
            if not isinstance(function, ast.FunctionDef) or len(function.body) < 2:
                continue
            if not ast.get_docstring(function):
                continue
            name, parts = function.name, []
            if owner is not None:
                name = f"{owner.name}.{name}"
                heads: list[ast.expr | ast.keyword] = [*owner.bases, *owner.keywords]
                ends = [part.end_lineno or 0 for part in heads]
                parts = lines[owner.lineno - 1 : max(owner.lineno, *ends, 0)]
            parts = [*parts, *lines[first_line(function) - 1 : function.body[0].end_lineno]]
            imports = imports_used(module, function)
            head = "\n".join([*imports, "", "", *parts] if imports else parts) + "\n"
            if MIN_CHARS <= len(head) <= MAX_CHARS and head.isascii():
                yield FunctionHead(f"{relative}:{name}", head)


def imports_used(module: ast.Module, function: ast.FunctionDef) -> list[str]:
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    used = []
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            if bound & names and len(node.names) <= 6:
                used.append(ast.unparse(node))
    return used


HELD_OUT_MODULUS = 20  # about one standard-library module in this many is held out
_SKIPPED_FOLDERS = frozenset(
    [
        *("__pycache__", "_pyinstaller", "_vendor", "_vendored_packages", "benchmarks", "conftest"),
        *("encodings", "ensurepip", "extern", "idlelib", "lib-dynload", "lib2to3", "locale"),
        *("locales", "pydoc_data", "site-packages", "test", "testing", "tests", "turtledemo"),
        *("vendor", "vendored"),
    ]
)


def is_held_out(relative_path: str) -> bool:
    """Whether a standard-library file ("json/decoder.py") is excluded from the bundled models'
    training, by CRC-32 of its path.
    """
    name = relative_path.replace("\\", "/").lstrip("/")
    return zlib.crc32(name.encode("utf-8")) % HELD_OUT_MODULUS == 0


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def python_files(root: Path) -> Iterator[tuple[str, Path]]:
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name.lower() not in _SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        if not path.name.startswith("test_") and not path.name.endswith("_test.py"):
            yield path.relative_to(root).as_posix(), path


def read_source(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(8)
