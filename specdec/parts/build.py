"""Checks and constructs parts from nodes ``{"_target_": "package.Class", argument: value, ...}``.

A class is called only if it has the methods of the Protocol of its kind, so a ``_target_`` cannot
name an arbitrary callable. Its module is imported to find that out, which runs the module's code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from typing_extensions import get_protocol_members, is_protocol

from specdec.errors import UserError
from specdec.parts.fields import errors_of, signature_of
from specdec.parts.suggest import did_you_mean

_T = TypeVar("_T")

FILLED = {
    "source": {"vocab_size", "sample", "free_rank"},
    "policy": {"latency", "in_flight"},
    "serving": {"batch_size", "prefill_chunk"},
    "clock": {"rank"},
}
"""Section -> plain arguments of its class that are no keys: the program passes them."""

_OPTIONAL = ("held_nodes",)  # of TreePolicy: only paged caches need it, and refuse its absence
_CONTAINERS = (Annotated, Union, UnionType, list, tuple, Sequence)


def locate(target: object, where: str, protocol: type | None = None) -> type:
    """Imports the class that ``_target_`` names, in the node at the dotted key ``where``.

    Raises:
        UserError: it cannot be imported, is not a class, or lacks methods of the Protocol (or is
            not derived from the class) ``protocol``.
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
    require(cls, protocol, at)
    return cls


def check_values(
    make: Callable[..., Any],
    values: Mapping[str, Any],
    where: str = "",
    label: str = "",
    *,
    given: Set[str] = frozenset(),
    also: Collection[str] = (),
    complete: bool = False,
) -> None:
    """Checks a section of a configuration against the parameters of a function or class.

    Args:
        where, label: the section's dotted key, and how the user chose it (default: the key).
        given: parameters that it may not state, since the program passes them.
        also: keys that it may state or leave out; unless parameters, they are not looked at.
        complete: whether it must state the parameters with defaults too.

    Raises:
        UserError: the first unknown, mistyped or missing key.
    """
    label, prefix = label or where or "the configuration", where and f"{where}."
    plain, required, _ = signature_of(make)
    names = (plain.keys() - given) | {*also}
    for key in values:
        if key not in names:
            hint = did_you_mean(key, names) or "it takes no keys"
            raise UserError(f"{label} has no key {key!r}: {hint}")
    for error in errors_of(make, values, prefix):
        raise UserError(error)
    for key in plain if complete else required:
        if key not in {*values, *given, *also}:
            at = f"{prefix}{key}"
            raise UserError(f"{label} lacks {key}: add {at}=VALUE, or leave out ~{at}")


def build(make: Callable[..., _T], values: Mapping[str, Any], where: str = "", **given: Any) -> _T:
    """Returns ``make(**values, **given)`` after ``check_values``."""
    check_values(make, values, where, given=given.keys())
    return make(**values, **given)


def build_part(
    node: object,
    runtime: Mapping[str, Callable[[], Any]] | None,
    where: str,
    protocol: type | None = None,
    *,
    label: str = "",
    known: Collection[str] = (),
) -> Any:
    """Constructs a part; parts inside it first.

    Args:
        runtime: argument name -> factory of the object passed where the node has no such key.
            None: everything is checked and nothing constructed; returns None.
        protocol: Protocol that the class and the object must satisfy; None checks nothing.
        where, label: the node's dotted key, and how the user chose it (default: the key).
        known: further keys that the section has.

    Raises:
        UserError: a class that does not fit, an unknown, missing or mistyped key, or a value that
            the class refuses.
    """
    label = label or where
    if isinstance(node, list):
        return [
            build_part(item, runtime, f"{where}[{i}]", protocol, label=f"{label}[{i}]")
            for i, item in enumerate(node)
        ]
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(f"{where}={node!r} is not a part: it needs _target_, the path of a class")
    cls = locate(node["_target_"], where, protocol)
    plain, _, objects = signature_of(cls)
    names = (*plain, *objects)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    nested = [key for key in names if _has_part(arguments.get(key))]
    check_values(
        cls,
        {key: value for key, value in arguments.items() if key not in nested},
        where,
        f"{label} (class {node['_target_']})",
        given=FILLED.get(where.partition(".")[0], set()) if runtime is None else set(),
        also={*nested, *known, *(plain.keys() & (runtime or {}).keys())},
    )
    for key in nested:
        at, expected = f"{where}.{key}", _expected(objects.get(key)) or protocol
        arguments[key] = build_part(arguments[key], runtime, at, expected, label=f"{label} at {at}")
    if runtime is None:
        return None
    missing = (name for name in names if name in runtime and name not in arguments)
    arguments.update({name: runtime[name]() for name in missing})
    try:
        part = cls(**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where} ({cls.__name__}): {error}") from error
    require(part, protocol, f"{where}._target_={node['_target_']}")
    return part


def require(candidate: Any, expected: type | None, at: str) -> None:
    """Refuses a class without the methods of a Protocol, or an object without its members.

    Args:
        candidate: the class or object.
        expected: the Protocol, or a base class; None refuses nothing.
        at: what the candidate is called in the message.

    Raises:
        UserError: with the names of what is missing.
    """
    if expected is None:
        return
    is_class = isinstance(candidate, type)
    if is_protocol(expected):  # properties are not read: they may compute, or raise
        members = {name: getattr(expected, name, None) for name in get_protocol_members(expected)}
        missing = sorted(
            name
            for name, member in members.items()
            if (callable(member) or not (is_class or isinstance(member, property)))
            and not (name in _OPTIONAL or _has(candidate, name, member))
        )
    else:
        fits = issubclass(candidate if is_class else type(candidate), expected)
        missing = [] if fits else [f"the base class {expected.__name__}"]
    if missing:
        raise UserError(
            f"{at} is not a {expected.__name__}: it lacks {', '.join(missing)}; name a class that"
            f" implements {expected.__module__}.{expected.__name__}"
        )


def _has(candidate: Any, name: str, member: Any) -> bool:
    """Whether there is the member; the stub of an inherited Protocol does not return a value."""
    if not hasattr(candidate, name):
        return False
    returns = getattr(member, "__annotations__", {}).get("return")
    owner = candidate if isinstance(candidate, type) else type(candidate)
    return returns in (None, "None") or getattr(owner, name, None) is not member


def _expected(hint: Any) -> type | None:
    """The class of the parts in a type hint such as ``Sequence[TokenSource]``."""
    if get_origin(hint) in _CONTAINERS:
        return next(filter(None, map(_expected, get_args(hint))), None)
    return hint if isinstance(hint, type) and hint not in (NoneType, object) else None


def _has_part(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_part, value))
    return isinstance(value, Mapping) and "_target_" in value
