"""Checks and constructs parts from nodes ``{"_target_": "package.Class", key: value, ...}``.

Keys of a node are arguments of the class. A class is called only if it has the methods of the
Protocol of its kind, so a ``_target_`` cannot name an arbitrary callable. Its module is imported
to find that out, which runs the module's code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Protocol, Union, get_args, get_origin

from specdec.errors import UserError
from specdec.parts.fields import errors_of, names_of, signature_of
from specdec.parts.suggest import did_you_mean

FILLED = frozenset({"vocab_size", "sample", "prefill_chunk", "latency", "batch_size", "rank"})
"""Plain arguments that follow from the rest of the configuration: no keys; ``compose`` passes
them."""

_OPTIONAL = ("held_nodes",)  # of TreePolicy: only paged caches need it, and refuse its absence
_CONTAINERS = (Annotated, Union, UnionType, list, tuple, Sequence)


def locate(target: object, where: str, protocol: type | None = None) -> type:
    """Imports the class that a ``_target_`` names.

    Args:
        target: the dotted path of a class.
        where: key of the node, for messages.
        protocol: Protocol whose methods the class must have, or a class it must inherit from.

    Raises:
        UserError: it cannot be imported, is not a class or lacks methods.
    """
    module, _, name = str(target).rpartition(".")
    at = f"{where}._target_={target}"
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{at} cannot be imported ({error}): give the dotted path of a class, for example"
            " specdec.policies.Chain, and put its folder on PYTHONPATH"
        ) from error
    if not isinstance(cls, type):
        raise UserError(f"{at} is not a class: name one that has the methods of the {where} part")
    _require(cls, protocol, at)
    return cls


def check_part(
    node: object,
    where: str,
    label: str,
    protocol: type | None = None,
    standard: Collection[str] = (),
) -> None:
    """Checks a part and the parts inside it without constructing anything.

    Args:
        node: plain values.
        where: its dotted key, for messages.
        label: how the user chose it, for messages.
        protocol: as for ``locate``.
        standard: further keys that the section has; they are not looked at.

    Raises:
        UserError: an unknown, missing or mistyped key, or a class that does not fit.
    """
    hidden = FILLED - set(standard)
    _, nested = _open(node, where, label, protocol, filled=hidden, hidden=hidden, standard=standard)
    for at, (inner, expected) in nested.items():
        check_part(inner, at, f"{label} at {at}", expected)


def build_part(
    node: Mapping[str, Any],
    runtime: Mapping[str, Callable[[], Any]],
    where: str,
    protocol: type | None = None,
) -> Any:
    """Constructs a part; parts inside it first.

    Args:
        node: plain values, ``_target_`` among them.
        runtime: argument name -> factory of the object passed where the node has no such key.
        where: dotted key of the node, for messages.
        protocol: Protocol that the class and the object must satisfy; None checks nothing.

    Raises:
        UserError: a class that does not fit, an unknown key, or a value that it refuses.
    """
    cls, nested = _open(node, where, where, protocol, filled=runtime)
    built = {at: build_part(inner, runtime, at, want) for at, (inner, want) in nested.items()}
    arguments = {k: _replaced(v, f"{where}.{k}", built) for k, v in node.items() if k != "_target_"}
    signature = signature_of(cls)
    for name in (*names_of(signature.model), *signature.objects):
        if name not in arguments and name in runtime:
            arguments[name] = runtime[name]()
    try:
        part = cls(**arguments)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} ({cls.__name__}): {error}") from error
    _require(part, protocol, f"{where}._target_={node['_target_']}")
    return part


def _open(
    node: object,
    where: str,
    label: str,
    protocol: type | None,
    *,
    filled: Collection[str],
    hidden: Collection[str] = (),
    standard: Collection[str] = (),
) -> tuple[type, dict[str, tuple[Any, type | None]]]:
    """Checks a node's class and keys; returns the class and {key: (inner node, its protocol)}."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(f"{where}={node!r} is not a part: it needs _target_, the path of a class")
    cls = locate(node["_target_"], where, protocol)
    signature = signature_of(cls)
    keys = [name for name in names_of(signature.model) if name not in hidden]
    nested: dict[str, tuple[Any, type | None]] = {}
    values = {}
    for key, value in node.items():
        inner = dict(_nodes(value, f"{where}.{key}"))
        if inner and (key in keys or key in signature.objects):
            expected = _expected(signature.objects.get(key)) or protocol
            nested |= {at: (part, expected) for at, part in inner.items()}
        elif key in keys:
            values[key] = value
        elif key != "_target_" and key not in standard:
            hint = did_you_mean(key, keys) or "it takes no keys"
            raise UserError(f"{label} has no key {key!r} (class {node['_target_']}): {hint}")
    missing = []
    for key, error in errors_of(signature.model, values, f"{where}."):
        if error != "missing":
            raise UserError(error)
        missing += [] if key in filled or key in node else [key]
    if missing:
        raise UserError(
            f"{label} lacks {', '.join(missing)} (class {node['_target_']}): add"
            f" {where}.{missing[0]}=VALUE"
        )
    return cls, nested


def _require(candidate: Any, expected: type | None, at: str) -> None:
    """Refuses a class without the methods of a Protocol, or an object without its members."""
    is_class = isinstance(candidate, type)
    if expected is None:
        return
    if Protocol not in expected.__bases__:
        fits = issubclass(candidate, expected) if is_class else isinstance(candidate, expected)
        missing = [] if fits else [f"the base class {expected.__name__}"]
    else:
        bases = [b for b in expected.__mro__ if b not in (object, Protocol, Generic)]
        names = {n for b in bases for n, v in vars(b).items() if callable(v)}
        if not is_class:
            names |= {n for b in bases for n in b.__annotations__}
        missing = sorted(
            n for n in names if n[0] != "_" and n not in _OPTIONAL and not hasattr(candidate, n)
        )
    if missing:
        raise UserError(
            f"{at} is not a {expected.__name__}: it lacks {', '.join(missing)}; name a class that"
            f" implements {expected.__module__}.{expected.__name__}"
        )


def _expected(hint: Any) -> type | None:
    """The class of the part that a type hint such as ``Sequence[TokenSource]`` asks for."""
    if get_origin(hint) in _CONTAINERS:
        return next(filter(None, map(_expected, get_args(hint))), None)
    return hint if isinstance(hint, type) and hint not in (NoneType, object) else None


def _nodes(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """The parts inside a value, each with its dotted key."""
    if isinstance(value, Mapping) and "_target_" in value:
        yield at, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _nodes(item, f"{at}[{i}]")


def _replaced(value: Any, at: str, built: Mapping[str, Any]) -> Any:
    if at in built:
        return built[at]
    if isinstance(value, list):
        return [_replaced(item, f"{at}[{i}]", built) for i, item in enumerate(value)]
    return value
