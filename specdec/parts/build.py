"""Checks and constructs parts from nodes ``{"_target_": "package.Class", argument: value, ...}``.

A class is called only if it subclasses the base of its kind, so a ``_target_`` cannot name an
arbitrary callable. Its module is imported to find that out, which runs the module's code.

All functions raise ``UserError`` for bad input. They share these arguments: ``where`` is the dotted
key of the section or node, ``label`` is what messages call it (default: the key), and ``base`` is
the base class that a class must have (None: any).
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Set
from functools import cache
from pkgutil import resolve_name
from typing import Any, get_args

from hydra.utils import instantiate

from specdec.errors import UserError
from specdec.parts.fields import did_you_mean, errors_of, signature_of

FILLED = {
    "source": {"vocab_size", "sample", "free_rank"},
    "policy": {"latency", "in_flight"},
    "serving": {"batch_size", "prefill_chunk"},
    "clock": {"rank"},
}
"""Section -> arguments of its class that the library passes, so configurations must omit them."""


def locate(target: object, where: str, base: type | None = None) -> type:
    at = f"{where}._target_={target}"
    try:
        cls = resolve_name(str(target))
    except Exception as error:  # whatever the module raises while it is imported
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        remedy = "correct the module (SPECDEC_TRACEBACK=1 shows where it fails)"
        if isinstance(error, ImportError | AttributeError | ValueError):
            remedy = "give the path of a class, for example specdec.policies.Chain, and put its"
            remedy += " folder on PYTHONPATH"
        raise UserError(f"{at} cannot be imported ({text}): {remedy}") from error
    if not isinstance(cls, type):
        raise UserError(f"{at} is not a class: name a class of the {where} part")
    if base is not None:
        check_class(cls, base, at)
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

    Parameters in ``given`` are passed by the library, so the section must not have them; keys in
    ``also`` are allowed besides the parameters. If ``complete``, parameters with defaults are
    required too.
    """
    label, prefix = label or where or "the configuration", where and f"{where}."
    plain, required, _ = signature_of(make)
    names = (plain.keys() - given) | {*also}
    for key in values:
        if key not in names:
            hint = did_you_mean(key, names) or "it takes no keys"
            raise UserError(f"{label} has no key {key!r}: {hint}")
    if errors := errors_of(make, values, prefix):
        raise UserError(errors[0])
    for key in plain if complete else required:
        if key not in {*values, *given, *also}:
            remedy = f"add +{prefix}{key}=VALUE, or the key to its YAML"
            raise UserError(f"{label} lacks {key}: {remedy}")


def build_part(
    node: object,
    runtime: Mapping[str, Callable[[], Any]] | None,
    where: str,
    base: type | None = None,
    *,
    label: str = "",
    common: Callable[..., Any] | None = None,
) -> Any:
    """Constructs the parts nested in a node, then the node's part, and returns it.

    ``runtime`` maps an argument to a factory of the object that is passed if the node lacks that
    key; if it is None, the node is only checked. Keys may also be parameters of ``common``, besides
    those of the class.
    """
    label = label or where
    if isinstance(node, list):
        return [build_part(item, runtime, f"{where}[{i}]", base) for i, item in enumerate(node)]
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(f"{where}={node!r} is not a part: it needs _target_, the path of a class")
    cls = locate(node["_target_"], where, base)
    plain, _, objects = signature_of(cls)
    nested = {key: node[key] for key in (*plain, *objects) if _has_part(node.get(key))}
    values = {key: value for key, value in node.items() if key not in ("_target_", *nested)}
    if runtime is None:  # values are checked once: a configuration that is built was checked
        given = FILLED.get(where.partition(".")[0], set())
        named = f"{label} (class {node['_target_']})"
        also = {*nested, *(signature_of(common).plain if common else ())}
        check_values(cls, values, where, named, given=given, also=also)
        for error in errors_of(common, values, f"{where}.") if common else ():
            raise UserError(error)
    for key, part in nested.items():
        hint, at = objects.get(key), f"{where}.{key}"  # its class, or that of its items
        inside = next((c for c in (hint, *get_args(hint)) if isinstance(c, type)), base)
        nested[key] = build_part(part, runtime, at, inside, label=f"{label} at {at}")
    if runtime is None:
        return None
    for name in (*plain, *objects):
        if name in runtime and name not in node:
            nested[name] = runtime[name]()
    try:
        # Partial, because OmegaConf would copy those objects that are dataclasses.
        make = instantiate({**values, "_target_": cls, "_partial_": True}, _convert_="all")
        return make(**nested)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} ({cls.__name__}): {error}") from error


@cache  # it takes milliseconds, and a class does not change
def check_class(cls: type, base: type, at: str) -> None:
    name, path = base.__name__, f"{base.__module__}.{base.__name__}"
    if not issubclass(cls, base):
        raise UserError(f"{at} is not a {name}: name a class that subclasses {path}")
    if inspect.isabstract(cls):
        lacking = ", ".join(sorted(vars(cls)["__abstractmethods__"]))
        raise UserError(f"{at} is not a {name}: it lacks {lacking}; see {path}")
    for method, declared in inspect.getmembers_static(base):
        own, wanted = inspect.getattr_static(cls, method), _signature(declared)
        found = None if method.startswith("_") or own is declared else _signature(own)
        if found and wanted and not _accepts(found, wanted):
            raise UserError(f"{at}: {method} takes {found}, but must take {wanted}; see {path}")


def _signature(method: Any) -> inspect.Signature | None:
    """Returns the parameters of a method, without ``self``; None for any other attribute."""
    function = getattr(method, "__func__", method)  # of a class method or static method
    if not inspect.isfunction(function):
        return None
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    shown = [p.replace(annotation=p.empty) for p in parameters]
    is_static = isinstance(method, staticmethod) or not shown
    return inspect.Signature(shown[not (is_static or shown[0].kind is shown[0].VAR_POSITIONAL) :])


def _accepts(own: inspect.Signature, declared: inspect.Signature) -> bool:
    """Whether ``own`` takes a call as ``declared``; True if that leaves it open (``*args``)."""
    parameters = declared.parameters.values()
    by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        own.bind(*[None] * (len(parameters) - len(by_name)), **by_name)
    except TypeError:
        return any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    return True


def _has_part(value: Any) -> bool:
    parts = value if isinstance(value, list) else []
    return any(map(_has_part, parts)) or (isinstance(value, Mapping) and "_target_" in value)
