"""What a ``_target_`` accepts, read from its source without importing it.

Importing a part imports torch, which takes longer than a user wants to wait to be told of a typo.
So the class is looked up in the syntax tree of its module; re-exports and base classes are
followed. Only what cannot be found so (a class built at run time) is imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specdec.errors import UserError
from specdec.parts.fields import Annotation


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a constructor.

    Attributes:
        annotation: its source text; "" where there is none.
        required: whether it has no default.
    """

    annotation: str
    required: bool

    @property
    def plain(self) -> bool:
        """Whether YAML can state it; other arguments are objects that the composer passes."""
        return bool(self.annotation) and Annotation(self.annotation).plain

    def refusal(self, value: object) -> str:
        """Why a YAML value cannot be used, as a sentence's end; "" where it can."""
        found = Annotation(self.annotation) if self.annotation else None
        return "" if found is None or found.accepts(value) else found.refusal


def parameters(target: str) -> dict[str, Parameter]:
    """The constructor's arguments of the class at a dotted path, by name.

    Raises:
        UserError: there is no such class or function.
    """
    module, _, name = target.rpartition(".")
    found = _static(module, name) if module else None
    return found if found is not None else _imported(target, module, name)


@cache
def _static(module: str, name: str, depth: int = 0) -> dict[str, Parameter] | None:
    path = _source_of(module)
    if path is None or depth > 4:
        return None
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node, module, depth)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _of_function(node)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _static(node.module, alias.name, depth + 1)
    return None


def _source_of(module: str) -> Path | None:
    """The file of a module, found without running any package above it but the first."""
    first, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest and (spec.origin or "").endswith(".py"):  # others are built in, or compiled
        return Path(str(spec.origin))
    for root in spec.submodule_search_locations or ():
        base = Path(root).joinpath(*rest)
        for candidate in (base / "__init__.py", base.with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None


def _of_class(node: ast.ClassDef, module: str, depth: int) -> dict[str, Parameter] | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _of_function(item)
    names = {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
    if names & {"dataclass", "dataclasses.dataclass"}:
        return {
            item.target.id: Parameter(ast.unparse(item.annotation), item.value is None)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
    for base in node.bases:
        inherited = _static(module, base.id, depth + 1) if isinstance(base, ast.Name) else None
        if inherited is None or inherited:
            return inherited
    return {}


def _of_function(node: ast.FunctionDef) -> dict[str, Parameter]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    num_required = len(positional) - len(arguments.defaults)
    found = {
        a.arg: Parameter(_text(a.annotation), i < num_required) for i, a in enumerate(positional)
    }
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[a.arg] = Parameter(_text(a.annotation), default is None)
    return found


def _text(annotation: ast.expr | None) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return "" if annotation is None else ast.unparse(annotation)


def _imported(target: str, module: str, name: str) -> dict[str, Parameter]:
    try:
        arguments = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"_target_={target!r} names nothing that can be imported ({error}); write the dotted"
            " path of a class, for example specdec.policies.Chain, and put its folder on PYTHONPATH"
        ) from error
    return {
        p.name: Parameter(
            p.annotation
            if isinstance(p.annotation, str)
            else getattr(p.annotation, "__name__", ""),
            p.default is inspect.Parameter.empty,
        )
        for p in arguments.values()
    }
