"""Types and bounds of constructor arguments, validated by pydantic.

    @validated
    def __init__(self, *, gamma: Count, delta: Annotated[float, Field(gt=0)] = 0.3) -> None: ...

Calls from Python and keys of a configuration are checked alike, strictly: ``"3"``, ``3.0`` and
``true`` are no ints, NaN and infinity are no floats; an int is accepted for a float, a list for a
tuple.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, wraps
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

import pydantic
from pydantic import Field
from pydantic_core import to_jsonable_python
from pydantic_core.core_schema import custom_error_schema

_Make = TypeVar("_Make", bound=Callable[..., Any])
_MAX_LISTED, _MAX_BESIDE = 24, 8  # words of a hint, and beside similar ones
_STRICT = pydantic.ConfigDict(strict=True, allow_inf_nan=False)


def expects(text: str) -> pydantic.GetPydanticSchema:
    """Returns ``Annotated`` metadata that makes ``text`` the error message of a field."""
    return pydantic.GetPydanticSchema(
        lambda hint, make: custom_error_schema(make(hint), "expects", custom_error_message=text)
    )


_COUNT = "it must be a whole number of at least 1"
_NO_DRAFTS = f"{_COUNT}; to decode without drafts use policy=root_only"

Text = Annotated[str, Field(min_length=1)]
Index = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1), expects(_COUNT)]
DraftCount = Annotated[int, Field(ge=1), expects(_NO_DRAFTS)]  # a size of a policy's trees
Limit = Annotated[int, Field(ge=0), expects("it must be a whole number of at least 0 (0 is off)")]
Threads = Annotated[int, Field(ge=1, le=1024), expects("it must be a whole number from 1 to 1024")]
Positive = Annotated[float, Field(gt=0, lt=1e9)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1), expects("it must be at least 0 and at most 1")]
PositiveShare = Annotated[float, Field(gt=0, le=1), expects("it must be above 0 and at most 1")]


class Signature(NamedTuple):
    plain: Mapping[str, pydantic.TypeAdapter[Any]]  # name -> validator
    required: tuple[str, ...]  # names in ``plain`` that have no default
    objects: Mapping[str, Any]  # name -> type hint, None where it exists for type checkers only


@cache
def signature_of(make: Callable[..., Any]) -> Signature:
    plain, required, objects = {}, [], {}
    body = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    for p in inspect.signature(make).parameters.values():
        if p.name == "self" or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        hint = Any if p.annotation is p.empty else _resolved(body, p.annotation)
        if (validator := _validator(hint)) is None:
            objects[p.name] = hint
        else:
            plain[p.name] = validator
            required += [p.name] if p.default is p.empty and hint is not Any else []
    return Signature(plain, tuple(required), objects)


def validated(make: _Make) -> _Make:
    """Makes a function, dataclass or ``__init__`` check its annotated arguments.

    A bad argument raises ``ValueError`` with its name, its value, the bound and the remedy.
    """
    if isinstance(make, type):
        make.__init__ = validated(make.__init__)  # type: ignore[misc]
        return make
    signature = inspect.signature(make)

    @wraps(make)
    def checking(*args: Any, **kwargs: Any) -> Any:
        for error in errors_of(make, signature.bind(*args, **kwargs).arguments):
            raise ValueError(error)
        return make(*args, **kwargs)

    return cast("_Make", checking)


def errors_of(make: Callable[..., Any], values: Mapping[str, Any], where: str = "") -> list[str]:
    messages: dict[str, dict[str, None]] = {}  # a union yields one message per member
    for key, validator in signature_of(make).plain.items():
        if key not in values:
            continue
        value = to_jsonable_python(values[key], fallback=lambda v: getattr(v, "item", v.__str__)())
        try:
            validator.validate_json(json.dumps(value))
        except pydantic.ValidationError as error:
            or_null = " or null" if validator.core_schema["type"] == "nullable" else ""
            for item in error.errors(include_url=False, include_context=False):
                at = "".join(f"[{i}]" for i in item["loc"] if isinstance(i, int))
                shown = "null" if item["input"] is None else repr(item["input"])
                must, semicolon, remedy = item["msg"].partition(";")
                must = must.replace("Input should", "it should").replace("valid array", "list")
                if item["type"] == "list_type" and not at:
                    remedy, semicolon = f" write '{where}{key}=[{item['input']}]'", ";"
                message = f"{must}{'' if at else or_null}{semicolon}{remedy}"
                messages.setdefault(f"{where}{key}{at}={shown}", {})[message] = None
    return [f"{at} cannot be used: {' or '.join(texts)}" for at, texts in messages.items()]


def _resolved(make: Callable[..., Any], annotation: Any) -> Any:
    owner = SimpleNamespace(__annotations__={"it": annotation})
    names = getattr(inspect.unwrap(make), "__globals__", {})
    try:
        return get_type_hints(owner, names, include_extras=True)["it"]
    except (NameError, AttributeError, TypeError):
        return None


def _validator(hint: Any) -> pydantic.TypeAdapter[Any] | None:
    if hint is None or object in (hint, *get_args(hint)):
        return None
    try:
        validator = pydantic.TypeAdapter(hint, config=_STRICT)
        schema = json.dumps(validator.json_schema())
    except pydantic.PydanticUserError:
        return None
    return None if '"properties"' in schema else validator  # a dataclass has it


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown word: similar known words, and a list of up to 24 known words
    if there are at most 8 or none is similar.
    """
    words = sorted(set(known))
    # A long dotted key is close to many others; its last part decides.
    near = get_close_matches(word, words, n=3, cutoff=0.6)
    near = near or [w for w in words if w.rpartition(".")[2] == word.rpartition(".")[2]][:3]
    question = f"did you mean {' or '.join(near)}?" if near else ""
    if not words or (near and len(words) > _MAX_BESIDE):
        return question
    shown = words if len(words) <= _MAX_LISTED else [*words[:_MAX_LISTED], "..."]
    listed = f"choose one of {', '.join(shown)}"
    return f"{question} {listed[0].upper()}{listed[1:]}" if question else listed
