"""Checks the values of parts from their source text, before anything heavy is imported.

The full check of a part (``specdec.parts.build``) imports its module, and with it torch, which
takes seconds. Most mistakes are values outside simple bounds, which the annotations of the class
tell.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.parts import fields

_PLAIN: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_MOST_HOPS = 4  # re-exports between a package and the module of a class


def check_early(where: str, node: object) -> None:
    """Refuses values of a node ``{"_target_": path, key: value}`` outside the bounds of its class.

    Whatever the source does not tell is left to the full check: a class without ``__init__`` of its
    own, other annotations, missing files, unknown keys.

    Raises:
        UserError: the message of the full check.
    """
    if isinstance(node, list):
        for i, item in enumerate(node):
            check_early(f"{where}[{i}]", item)
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        return
    for key, value in node.items():
        check_early(f"{where}.{key}", value)
    bounds = _annotations(node["_target_"])
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint)
        for name, hint in bounds.items()
    ]

    def taker() -> None:
        """Has the parameters of the class."""

    taker.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    for error in fields.errors_of(taker, {k: node[k] for k in bounds if k in node}, f"{where}."):
        raise UserError(error)


def _annotations(target: str) -> dict[str, Any]:
    """Parameters of a class and their types, of those annotated with a name of ``fields``."""
    module, _, name = target.rpartition(".")
    for _ in range(_MOST_HOPS):
        tree = _source(module)
        if tree is None:
            return {}
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return _parameters(tree, statement)
        moved = _exported_from(tree, name)
        if moved is None:
            return {}
        module, name = moved
    return {}


def _source(module: str) -> ast.Module | None:
    """The syntax tree of a module, found without importing it or its packages."""
    path, spec = None, None
    names = module.split(".")
    for i in range(len(names)):
        spec = PathFinder.find_spec(".".join(names[: i + 1]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _exported_from(tree: ast.Module, name: str) -> tuple[str, str] | None:
    """Where a package imports a name from: module and name there."""
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return statement.module, alias.name
    return None


def _parameters(tree: ast.Module, cls: ast.ClassDef) -> dict[str, Any]:
    for statement in cls.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = [*statement.args.args, *statement.args.kwonlyargs]
            hints = {a.arg: _type(tree, a.annotation) for a in arguments if a.annotation}
            return {name: hint for name, hint in hints.items() if hint is not None}
    return {}


def _type(tree: ast.Module, annotation: ast.expr) -> Any:
    """The type of a plain type, a name of ``fields``, or either with None; else None."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = _named(tree, annotation.left), annotation.right
        optional = isinstance(right, ast.Constant) and right.value is None
        return left | None if left is not None and optional else None
    return _named(tree, annotation)


def _named(tree: ast.Module, annotation: ast.expr) -> Any:
    if not isinstance(annotation, ast.Name):
        return None
    if annotation.id in _PLAIN:
        return _PLAIN[annotation.id]
    moved = _exported_from(tree, annotation.id)
    return getattr(fields, moved[1], None) if moved and moved[0] == fields.__name__ else None
