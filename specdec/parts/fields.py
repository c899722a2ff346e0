"""What a constructor's arguments may be: types and bounds, stated once, in its signature.

    @validated
    def __init__(self, *, gamma: Count, delta: Annotated[float, Bound(above=0)]) -> None: ...

The command line reads the same annotations from the source of the class, without importing it, so a
value out of its bounds is refused before torch is imported; ``validated`` refuses it in Python.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce, wraps
from typing import Annotated, ParamSpec

_P = ParamSpec("_P")

_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
    "Path": (str,),
}
_WORDS = {  # one, many
    "int": ("a whole number", "whole numbers"),
    "float": ("a number", "numbers"),
    "str": ("a text", "texts"),
    "bool": ("true or false", "true or false"),
    "None": ("null", "null"),
    "Path": ("a path", "paths"),
}
_SEQUENCES = frozenset({"list", "tuple", "Sequence", "Iterable", "Collection"})
_MAPPINGS = frozenset({"dict", "Mapping"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Between which numbers an argument must lie; metadata of ``typing.Annotated``.

    Attributes:
        at_least: least value.
        above: every value is greater than this.
        at_most: greatest value.
        remedy: what to do instead, said behind the refusal.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    remedy: str = ""

    def admits(self, value: float) -> bool:
        """Whether a number lies inside; NaN never does."""
        return (
            value == value
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        """The words behind "a number"."""
        low = None if self.at_least is None else f"of at least {self.at_least:g}"
        low = f"above {self.above:g}" if self.above is not None else low
        high = None if self.at_most is None else f"at most {self.at_most:g}"
        return " and ".join(word for word in (low, high) if word)


Count = Annotated[int, Bound(at_least=1)]
"""A size: a whole number of at least 1."""

DraftCount = Annotated[
    int, Bound(at_least=1, remedy="to decode without drafts use policy=root_only")
]
"""A size of a policy's trees that cannot be 0."""

Share = Annotated[float, Bound(at_least=0, at_most=1)]
"""A probability or a share."""

PositiveShare = Annotated[float, Bound(above=0, at_most=1)]
"""A probability or a share that cannot be 0."""

_NAMED = {"Count": Count, "DraftCount": DraftCount, "Share": Share, "PositiveShare": PositiveShare}


class Annotation:
    """An argument's annotation, read from its source text: nothing that it names is imported.

    What YAML can state is understood: scalars, ``None``, lists and mappings of them, ``Literal``,
    unions, ``Annotated[..., Bound(...)]`` with numbers and texts written out, and the names that
    this module gives to some of these.
    """

    def __init__(self, text: str) -> None:
        self._node: ast.expr = _Spelled().visit(_parsed(text))
        found = (_bound(n) for n in ast.walk(self._node) if isinstance(n, ast.Call))
        self._bounds = [bound for bound in found if bound is not None]

    @property
    def validated(self) -> bool:
        """Whether it says more than types: bounds, or words to choose from."""
        heads = {_head(n) for n in ast.walk(self._node) if isinstance(n, ast.Subscript)}
        return bool(self._bounds) or "Literal" in heads

    @property
    def plain(self) -> bool:
        """Whether YAML can state its values; others are objects that the composer passes."""
        return _is_plain(self._node)

    def accepts(self, value: object) -> bool:
        """Whether a value fits; True for what YAML cannot state alone."""
        return _accepts(self._node, value)

    @property
    def refusal(self) -> str:
        """Completes the sentence "VALUE cannot be used: "."""
        remedies = dict.fromkeys(bound.remedy for bound in self._bounds if bound.remedy)
        return "; ".join([f"it must be {_said(self._node)}", *remedies])


class _Spelled(ast.NodeTransformer):
    """One spelling: this module's names written out, ``Optional`` and ``Union`` as ``|``."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A name, perhaps one of this module's."""
        return _parsed(str(_NAMED[node.id])) if node.id in _NAMED else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Something in brackets, perhaps a union."""
        self.generic_visit(node)
        if _head(node) not in ("Optional", "Union"):
            return node
        options = [*_inner(node), *([_parsed("None")] if _head(node) == "Optional" else [])]
        return reduce(lambda left, right: ast.BinOp(left, ast.BitOr(), right), options)


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def validated(make: Callable[_P, None]) -> Callable[_P, None]:
    """Has a constructor refuse arguments outside the bounds of its signature.

    Raises:
        ValueError: from the constructor, naming the argument, its value, the bound and the remedy.
    """
    signature = inspect.signature(make)
    checked = {
        name: found
        for name, parameter in signature.parameters.items()
        if parameter.annotation is not parameter.empty
        and (found := _read(_source(parameter.annotation))) is not None
        and found.validated
    }

    @wraps(make)
    def checking(*args: _P.args, **kwargs: _P.kwargs) -> None:
        given = signature.bind(*args, **kwargs).arguments
        for name, annotation in checked.items():
            if name in given and not annotation.accepts(given[name]):
                raise ValueError(f"{name}={given[name]!r} cannot be used: {annotation.refusal}")
        make(*args, **kwargs)

    return checking


def _source(annotation: object) -> str:
    """An annotation's text, also where it was evaluated (no ``from __future__ import``)."""
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


@cache
def _read(text: str) -> Annotation | None:
    try:
        return Annotation(text)
    except SyntaxError:  # an object whose text is no Python
        return None


def _bound(node: ast.expr) -> Bound | None:
    """What ``Bound(...)`` in an annotation states."""
    if not isinstance(node, ast.Call) or _head(node.func) != "Bound":
        return None
    return Bound(**{str(k.arg): ast.literal_eval(k.value) for k in node.keywords})


def _inner(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _is_plain(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_plain(node.left) and _is_plain(node.right)
    if isinstance(node, ast.Constant):
        return node.value is None or node.value is Ellipsis
    if isinstance(node, ast.Subscript):
        head = _head(node)
        if head == "Literal":
            return True
        if head == "Annotated":
            return _is_plain(_inner(node)[0])
        return head in _SEQUENCES | _MAPPINGS and all(_is_plain(item) for item in _inner(node))
    return _head(node) in _SCALARS.keys() | _SEQUENCES | _MAPPINGS


def _accepts(node: ast.expr, value: object) -> bool:
    if isinstance(node, ast.BinOp):
        return _accepts(node.left, value) or _accepts(node.right, value)
    if isinstance(node, ast.Constant):
        return value is None if node.value is None else True
    head = _head(node)
    if head in _SCALARS:
        if isinstance(value, bool):
            return head == "bool"
        return isinstance(value, _SCALARS[head])
    if head in _SEQUENCES:
        return isinstance(value, list | tuple) and _items_fit(node, value)
    if head in _MAPPINGS:
        return isinstance(value, dict)
    if isinstance(node, ast.Subscript) and head == "Literal":
        return value in [item.value for item in _inner(node) if isinstance(item, ast.Constant)]
    if isinstance(node, ast.Subscript) and head == "Annotated":
        base, *rest = _inner(node)
        bounds = [bound for item in rest if (bound := _bound(item)) is not None]
        return _accepts(base, value) and all(bound.admits(value) for bound in bounds)  # type: ignore[arg-type]
    # Any other name is an object: a nested part, or an enum's value by its text.
    return isinstance(value, dict | str)


def _items_fit(node: ast.expr, value: list[object] | tuple[object, ...]) -> bool:
    if not isinstance(node, ast.Subscript):
        return True
    first = _inner(node)[0]
    return all(_accepts(first, item) for item in value)


def _said(node: ast.expr, *, many: bool = False) -> str:
    """What values of an annotation are, in words."""
    if isinstance(node, ast.BinOp):
        return f"{_said(node.left, many=many)} or {_said(node.right, many=many)}"
    head = "None" if isinstance(node, ast.Constant) and node.value is None else _head(node)
    if head in _WORDS:
        return _WORDS[head][many]
    if isinstance(node, ast.Subscript) and head in _SEQUENCES:
        return f"{'lists' if many else 'a list'} of {_said(_inner(node)[0], many=True)}"
    if isinstance(node, ast.Subscript) and head == "Literal":
        return f"one of {', '.join(ast.unparse(item).strip(chr(39)) for item in _inner(node))}"
    if isinstance(node, ast.Subscript) and head == "Annotated":
        base, *rest = _inner(node)
        bounds = [str(bound) for item in rest if (bound := _bound(item)) is not None]
        return " ".join([_said(base, many=many), *bounds])
    if head in _MAPPINGS:
        return "a mapping"
    return "a list" if head in _SEQUENCES else ast.unparse(node)


def _head(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
