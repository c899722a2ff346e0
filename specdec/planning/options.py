from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.errors import UserError
from specdec.parts.fields import (
    Count,
    NotNegative,
    Positive,
    Text,
    did_you_mean,
    errors_of,
    expects,
    validated,
)

Counts = Annotated[
    tuple[Count, ...],
    Field(min_length=1),
    expects("it must be whole numbers of at least 1, as in 1,4,16 or 512,8k"),
]
_LISTS = ("batch", "context", "strategies")
_TEXTS = ("profile", "acceptance", "method", "check", "objective", "drafter")

MEASURED = "measured"
"""The value of ``profile`` that measures the models of this run on this machine."""


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of ``specdec plan``, as its help describes them.

    Attributes:
        profile: a profile's name or path, the path of a described machine, or "measured".
        devices: number of devices, the draft's included; None: as many as the profile has.
        batch, context: the first one is ranked, the others are in the tables.
        acceptance: an engine's log or trace, in place of a law of ``model=``.
        strategies: presets to try; empty for all.
        check: "true" runs the first choice; a run folder compares its results; empty does neither.
    """

    profile: Text | None = None
    devices: Count | None = None
    link_ms: NotNegative | None = None
    link_gb_s: Positive | None = None
    batch: Counts = (1,)
    context: Counts = (512,)
    objective: Literal["latency", "throughput", "per_device"] = "latency"
    acceptance: Text | None = None
    method: Text | None = None
    draft_tokens: Count | None = None
    drafter: Literal["draft_model", "eagle", "eagle3", "ngram"] = "draft_model"
    strategies: tuple[Text, ...] = ()
    prompts: Annotated[int, Field(ge=4, le=1000)] = 24
    budget_s: Positive = 60.0
    check: str = ""


def split_words(
    words: Iterable[str], keys: Mapping[str, Any] | None = None
) -> tuple[PlanOptions, list[str]]:
    """Returns the options of the plan, and the words that are left for the configuration.

    ``keys`` are options as values, which take precedence over words.
    """
    known = {field.name for field in fields(PlanOptions)}
    own: dict[str, Any] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in known:
            own[key] = _value(key, value)
        else:
            rest.append(word)
    for key, value in (keys or {}).items():
        if key not in known:
            raise UserError(f"{key} is no key of a plan: {did_you_mean(key, known)}")
        own[key] = tuple(value) if isinstance(value, list) else value
    for error in errors_of(PlanOptions, own):
        raise UserError(error)
    return PlanOptions(**own), rest


def _value(key: str, text: str) -> Any:
    if key in _LISTS:
        items = [item.strip() for item in text.strip("[]").split(",") if item.strip()]
        return tuple(items if key == "strategies" else map(_number, items))
    return text if key in _TEXTS else _number(text)


def _number(text: str) -> Any:
    """Converts a text to a number if it is one; ``8k`` is 8192."""
    if kilo := re.fullmatch(r"(\d+)k", text):
        return int(kilo[1]) * 1024
    if text in ("null", "none"):
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
