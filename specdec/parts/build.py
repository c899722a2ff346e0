"""Checks and constructs parts from nodes ``{"_target_": "package.Class", key: value, ...}``.

Keys of a node are arguments of the class. A class is called only if it has the methods of the
Protocol of its kind, so a ``_target_`` cannot name an arbitrary callable. Its module is imported
to find that out, which runs the module's code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from typing_extensions import get_protocol_members, is_protocol

from specdec.errors import UserError
from specdec.parts.fields import Model, errors_of, names_of, signature_of
from specdec.parts.suggest import did_you_mean

FILLED: Mapping[str, frozenset[str]] = {
    "source": frozenset({"vocab_size", "sample"}),
    "policy": frozenset({"latency"}),
    "serving": frozenset({"batch_size", "prefill_chunk"}),
    "clock": frozenset({"rank"}),
}
"""Section -> plain arguments of its class that follow from the rest of the configuration: no keys;
the program passes them."""

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
    at = f"{where}._target_={target}"
    try:
        cls = resolve_name(str(target))
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{at} cannot be imported ({error}): give the dotted path of a class, for example"
            " specdec.policies.Chain, and put its folder on PYTHONPATH"
        ) from error
    if not isinstance(cls, type):
        raise UserError(f"{at} is not a class: name one that has the methods of the {where} part")
    _require(cls, protocol, at)
    return cls


def check_keys(
    model: Model,
    values: Mapping[str, Any],
    where: str,
    label: str,
    *,
    names: Collection[str],
    required: Collection[str] = (),
) -> None:
    """Checks plain values against a model.

    Args:
        model, values: see ``errors_of``.
        where: prefix of the keys in messages, as in "policy.".
        label: how the user chose the section, for messages.
        names: keys that a configuration may state here.
        required: keys that must be present.

    Raises:
        UserError: the first unknown, mistyped or missing key.
    """
    for key in values:
        if key not in names:
            hint = did_you_mean(key, names) or "it takes no keys"
            raise UserError(f"{label} has no key {key!r}: {hint}")
    for error in errors_of(model, values, where):
        raise UserError(error)
    for key in required:
        if key not in values:
            at = f"{where}{key}"
            raise UserError(f"{label} lacks {key}: add {at}=VALUE, or leave out ~{at}")


def check_part(
    node: object, where: str, label: str, protocol: type | None = None, known: Collection[str] = ()
) -> None:
    """Checks a part and the parts inside it as ``build_part`` does, without constructing them.

    Args:
        node, where, protocol: see ``build_part``.
        label: how the user chose the part, for messages.
        known: further keys that the section has; they are not looked at.

    Raises:
        UserError: an unknown, missing or mistyped key, or a class that does not fit.
    """
    _part(node, where, label, protocol, known=known)


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
    return _part(node, where, where, protocol, runtime)


def _part(
    node: object,
    where: str,
    label: str,
    protocol: type | None,
    runtime: Mapping[str, Callable[[], Any]] | None = None,
    known: Collection[str] = (),
) -> Any:
    """Checks a node and, with ``runtime``, constructs it."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(f"{where}={node!r} is not a part: it needs _target_, the path of a class")
    cls = locate(node["_target_"], where, protocol)
    model, objects = signature_of(cls)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    nested = {key for key in (*names_of(model), *objects) if _has_part(arguments.get(key))}
    hidden = FILLED.get(where.partition(".")[0], frozenset()) if runtime is None else frozenset()
    names = [name for name in names_of(model) if name not in hidden or name in known]
    elsewhere = {*nested, *known, *(hidden if runtime is None else runtime)}
    check_keys(
        model,
        {key: value for key, value in arguments.items() if key not in nested},
        f"{where}.",
        f"{label} (class {node['_target_']})",
        names=(*names, *known),
        required=[key for key in names_of(model, required=True) if key not in elsewhere],
    )

    def visited(value: Any, at: str, expected: type | None) -> Any:
        if isinstance(value, list):
            return [visited(item, f"{at}[{i}]", expected) for i, item in enumerate(value)]
        is_part = _has_part(value)
        return _part(value, at, f"{label} at {at}", expected, runtime) if is_part else value

    for key in nested:
        expected = _expected(objects.get(key)) or protocol
        arguments[key] = visited(arguments[key], f"{where}.{key}", expected)
    if runtime is None:
        return None
    for name in (*names_of(model), *objects):
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


def _require(candidate: Any, expected: type | None, at: str) -> None:
    """Refuses a class without the methods of a Protocol, or an object without its members."""
    is_class = isinstance(candidate, type)
    if expected is None:
        return
    if not is_protocol(expected):
        fits = issubclass(candidate, expected) if is_class else isinstance(candidate, expected)
        missing = [] if fits else [f"the base class {expected.__name__}"]
    else:
        members = {name: getattr(expected, name, None) for name in get_protocol_members(expected)}
        missing = sorted(  # properties are not read: they may compute, or raise
            name
            for name, member in members.items()
            if (callable(member) or not (is_class or isinstance(member, property)))
            and not (name in _OPTIONAL or hasattr(candidate, name))
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


def _has_part(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_part, value))
    return isinstance(value, Mapping) and "_target_" in value
