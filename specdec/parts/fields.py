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
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

import pydantic
from pydantic import Field, ValidationError
from pydantic_core import to_jsonable_python
from pydantic_core.core_schema import custom_error_schema

_Make = TypeVar("_Make", bound=Callable[..., Any])
Model = type[pydantic.BaseModel]


def expects(text: str) -> pydantic.GetPydanticSchema:
    """Metadata of ``typing.Annotated``: the error message of a field in place of pydantic's.

    Args:
        text: what the value must be and the remedy, as in "it must be even; or use X".
    """
    message = {"custom_error_type": "expects", "custom_error_message": text}
    return pydantic.GetPydanticSchema(lambda hint, make: custom_error_schema(make(hint), **message))


_COUNT = "it must be a whole number of at least 1"
_SHARE = "it must be a number of at least 0 and at most 1"
_POSITIVE_SHARE = "it must be a number above 0 and at most 1"

Text = Annotated[str, Field(min_length=1)]
Index = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1), expects(_COUNT)]
DraftCount = Annotated[
    int, Field(ge=1), expects(f"{_COUNT}; to decode without drafts use policy=root_only")
]
"""A size of a policy's trees."""
Limit = Annotated[int, Field(ge=0), expects("it must be a whole number of at least 0 (0 is off)")]
Positive = Annotated[float, Field(gt=0, lt=1e9)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1), expects(_SHARE)]
PositiveShare = Annotated[float, Field(gt=0, le=1), expects(_POSITIVE_SHARE)]


class Signature(NamedTuple):
    """Parameters of a callable: those that a configuration can state, as a strict model, and the
    type hints of the objects that the program passes (None: not resolvable at run time)."""

    model: Model
    objects: Mapping[str, Any]


@cache
def signature_of(make: Callable[..., Any]) -> Signature:
    """The parameters of a class or function; one without annotation takes every value."""
    fields: dict[str, Any] = {}  # prefixed, since a model may not have a field named "copy"
    objects: dict[str, Any] = {}
    body = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    for p in inspect.signature(make).parameters.values():
        if p.name == "self" or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        hint = Any if p.annotation is p.empty else _resolved(body, p.annotation)
        if _is_plain(hint):
            required = p.default is p.empty and hint is not Any
            fields[f"key_{p.name}"] = hint, Field(... if required else None, alias=p.name)
        else:
            objects[p.name] = hint
    config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)
    return Signature(pydantic.create_model("Values", __config__=config, **fields), objects)


def names_of(model: Model, *, required: bool = False) -> tuple[str, ...]:
    """The keys of a model, or those without a default alone."""
    fields = model.model_fields.values()
    return tuple(str(f.alias) for f in fields if f.is_required() or not required)


def validated(make: _Make) -> _Make:
    """Decorates an ``__init__``, a dataclass or a function to validate its annotated arguments.

    Raises:
        ValueError: from the call, naming the argument, its value, the bound and the remedy.
    """
    if isinstance(make, type):
        make.__init__ = validated(make.__init__)  # type: ignore[misc]
        return make
    signature = inspect.signature(make)

    @wraps(make)
    def checking(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for error in errors_of(signature_of(make).model, arguments):
            raise ValueError(error)
        return make(*args, **kwargs)

    return cast("_Make", checking)


def errors_of(model: Model, values: Mapping[str, Any], where: str = "") -> list[str]:
    """One message per value that a model refuses; missing and unknown keys are no errors.

    Args:
        where: prefix of the keys in messages, as in "policy.".
    """
    known = {key: values[key] for key in names_of(model) if key in values}
    texts = to_jsonable_python(known, fallback=lambda v: getattr(v, "item", v.__str__)())
    try:
        model.model_validate_json(json.dumps(texts))
        return []
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
    messages: dict[str, dict[str, None]] = {}  # several for a union's members
    for item in (item for item in items if item["type"] != "missing"):
        key, *rest = item["loc"] or (next(iter(known)),)  # empty: text that is not Unicode
        indices = "".join(f"[{i}]" for i in rest if isinstance(i, int))
        shown = "null" if item["input"] is None else repr(item["input"])
        text = item["msg"].replace("Input should", "it should").replace("valid array", "list")
        if not indices and NoneType in get_args(model.model_fields[f"key_{key}"].annotation):
            text = " or null;".join(text.split(";", 1)) if ";" in text else f"{text} or null"
        messages.setdefault(f"{where}{key}{indices}={shown}", {})[text] = None
    return [f"{at} cannot be used: {' or '.join(texts)}" for at, texts in messages.items()]


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
        schema = pydantic.TypeAdapter(hint).json_schema()
    except pydantic.PydanticUserError:
        return False
    return '"properties"' not in json.dumps(schema)  # which a dataclass has
