"""Lazy exports: names of a package whose modules are imported when the names are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions ``__getattr__`` and ``__dir__`` for the package named ``package``.

    They export what the package's ``__init__.py`` imports under ``if TYPE_CHECKING``: type checkers
    and readers see ordinary imports, and a program loads only modules of names that it uses.
    """
    module = sys.modules[package]
    modules: dict[str, str] = {}  # exported name -> module that defines it
    for block in ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                modules |= {alias.name: str(node.module) for alias in node.names}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(module, name, value)  # found directly from now on
        return value

    return load, lambda: sorted({*vars(module), *modules})
