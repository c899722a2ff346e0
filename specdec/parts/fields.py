"""Types and bounds of constructor arguments, validated by pydantic.

    @validated
    def __init__(self, *, gamma: Count, delta: Annotated[float, Field(gt=0)] = 0.3) -> None: ...

``validated`` checks the arguments of a call from Python; ``signature_of`` gives the pydantic model
that checks the same arguments in a configuration. Both are strict: ``"3"``, ``3.0`` and ``true``
are no ints, NaN and infinity are no floats; an int is accepted for a float, a list for a tuple.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.functional_validators import WrapValidator
from pydantic_core import PydanticCustomError

from specdec.errors import UserError
from specdec.parts.suggest import did_you_mean

_P = ParamSpec("_P")
_T = TypeVar("_T")
Model = type[BaseModel]


def expects(text: str) -> WrapValidator:
    """Metadata of ``typing.Annotated``: the error message of a field in place of pydantic's.

    Args:
        text: what the value must be and the remedy, as in "it must be even; or use X".
    """

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            raise PydanticCustomError("expects", "{text}", {"text": text}) from error

    return WrapValidator(check)


_COUNT = "it must be a whole number of at least 1"
_POSITIVE_SHARE = "it must be a number above 0 and at most 1"

Count = Annotated[int, Field(ge=1), expects(_COUNT)]
"""An int of at least 1."""

DraftCount = Annotated[
    int, Field(ge=1), expects(f"{_COUNT}; to decode without drafts use policy=root_only")
]
"""A size of a policy's trees: an int of at least 1."""

Share = Annotated[
    float, Field(ge=0, le=1), expects("it must be a number of at least 0 and at most 1")
]
"""A probability or a share: a float from 0 to 1."""

PositiveShare = Annotated[float, Field(gt=0, le=1), expects(_POSITIVE_SHARE)]
"""A probability or a share above 0 and at most 1."""


Positive = Annotated[float, Field(gt=0)]
"""A float above 0."""

NotNegative = Annotated[float, Field(ge=0)]
"""A float of at least 0."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a constructor.

    Attributes:
        model: the parameters that a configuration can state.
        objects: name -> type hint of the other parameters, which the program passes; None where
            it cannot be resolved at run time (a name imported under ``TYPE_CHECKING``).
    """

    model: Model
    objects: Mapping[str, Any]


@cache
def signature_of(make: Callable[..., Any]) -> Signature:
    """The parameters of a class or function; one without annotation takes every value."""
    fields: dict[str, tuple[Any, bool]] = {}
    objects: dict[str, Any] = {}
    body = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    for p in inspect.signature(make).parameters.values():
        if p.name == "self" or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        hint = Any if p.annotation is p.empty else _resolved(body, p.annotation)
        if _is_plain(hint):
            fields[p.name] = (hint, p.default is p.empty and hint is not Any)
        else:
            objects[p.name] = hint
    return Signature(model_of(fields), objects)


def model_of(fields: Mapping[str, tuple[Any, bool]]) -> Model:
    """A strict pydantic model of {key: (type hint, whether it is required)}; no other keys."""
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    named: dict[str, Any] = {  # prefixed, since a model may not have a field named "copy"
        f"key_{name}": (hint, Field(... if required else None, alias=name))
        for name, (hint, required) in fields.items()
    }
    return create_model("Values", __config__=config, **named)


def names_of(model: Model) -> tuple[str, ...]:
    """The keys of a model."""
    return tuple(str(field.alias) for field in model.model_fields.values())


def validated(make: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates an ``__init__`` so that it validates its arguments against their annotations.

    Raises:
        ValueError: from the constructor, naming the argument, its value, the bound and the remedy.
    """
    signature = inspect.signature(make)

    @wraps(make)
    def checking(*args: _P.args, **kwargs: _P.kwargs) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        model = signature_of(make).model
        values = {name: arguments[name] for name in names_of(model) if name in arguments}
        for _, message in errors_of(model, values):
            raise ValueError(message)
        make(*args, **kwargs)

    return checking


def errors_of(model: Model, values: Mapping[str, Any], where: str = "") -> list[tuple[str, str]]:
    """Validates values.

    Args:
        where: dotted key of the values, for messages.

    Returns:
        (key, message) per refused value; the message is "unknown" or "missing" for such a key.
        Unknown keys come first.
    """
    try:
        model.model_validate_json(json.dumps(values, default=_as_json))
        return []
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
    messages: dict[tuple[str, str], dict[str, None]] = {}  # several for a union's members
    for item in sorted(items, key=lambda item: item["type"] != "extra_forbidden"):
        key, *rest = item["loc"] or (next(iter(values)),)  # empty: text that is not Unicode
        at = ""
        text = {"extra_forbidden": "unknown", "missing": "missing"}.get(item["type"], "")
        if not text or rest:
            indices = "".join(f"[{i}]" for i in rest if isinstance(i, int))
            at = f"{where}{key}{indices}={_shown(item['input'])} cannot be used: "
            text = item["msg"].replace("Input should", "it should").replace("valid array", "list")
            if not indices and NoneType in get_args(model.model_fields[f"key_{key}"].annotation):
                text = " or null;".join(text.split(";", 1)) if ";" in text else f"{text} or null"
        messages.setdefault((str(key), at), {})[text] = None
    return [(key, at + " or ".join(texts)) for (key, at), texts in messages.items()]


def check_values(
    make: Callable[..., Any],
    values: Mapping[str, Any],
    where: str = "",
    *,
    given: Collection[str] = (),
    also: Collection[str] = (),
) -> None:
    """Checks a section of a configuration against the parameters of a function or class.

    Args:
        where: dotted key of the section, for messages.
        given: parameters that the section does not state.
        also: further known keys, for messages.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    model = signature_of(make).model
    missing = []
    for key, error in errors_of(model, values, f"{where}." if where else ""):
        if error == "unknown":
            hint = did_you_mean(key, [*names_of(model), *also])
            raise UserError(f"{where and where + ': '}unknown key {key!r}: {hint}")
        if error != "missing":
            raise UserError(error)
        missing += [] if key in given else [key]
    if missing:
        raise UserError(f"{where and where + ': '}missing keys: {', '.join(missing)}")


def build(make: Callable[..., _T], values: Mapping[str, Any], where: str = "", **given: Any) -> _T:
    """Returns ``make(**values, **given)`` after ``check_values``."""
    check_values(make, values, where, given=given)
    return make(**values, **given)


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def _resolved(make: Callable[..., Any], annotation: Any) -> Any:
    owner = SimpleNamespace(__annotations__={"it": annotation})
    names = getattr(inspect.unwrap(make), "__globals__", {})
    try:
        return get_type_hints(owner, names, include_extras=True)["it"]
    except (NameError, AttributeError, TypeError):
        return None


def _is_plain(hint: Any) -> bool:
    """Whether YAML can state values of a type: scalars, texts to choose from, lists, mappings."""
    if hint is None or object in (hint, *get_args(hint)):
        return False
    try:
        schema = TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return False
    return '"properties"' not in json.dumps(schema)  # which a dataclass has


def _as_json(value: Any) -> Any:
    """JSON for values from Python that YAML does not have."""
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, Integral):  # numpy's, which are no Python ints
        return int(value)
    if isinstance(value, Enum):
        return value.value
    return float(value) if isinstance(value, Real) else str(value)
