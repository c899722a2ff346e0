from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.config.hydra import read_keys
from specdec.errors import UserError
from specdec.parts.fields import (
    Count,
    NotNegative,
    Positive,
    Text,
    did_you_mean,
    errors_of,
    expects,
    signature_of,
    validated,
)

MEASURED = "measured"
"""The value of ``profile`` that measures the models of this run on this machine."""

_Counts = Annotated[
    tuple[Count, ...],
    Field(min_length=1),
    expects("it must be whole numbers of at least 1, as in 1,4,16 or 512,8k"),
]


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of ``specdec plan``, which its help describes."""

    profile: Text | None = None
    devices: Count | None = None
    link_ms: NotNegative | None = None
    link_gb_s: Positive | None = None
    batch: _Counts = (1,)
    context: _Counts = (512,)
    objective: Literal["latency", "throughput", "per_device"] = "latency"
    acceptance: Text | None = None
    method: Text | None = None
    draft_tokens: Count | None = None
    drafter: Literal["draft_model", "eagle", "eagle3", "ngram"] = "draft_model"
    strategies: tuple[Text, ...] = ()
    prompts: Annotated[int, Field(ge=4, le=1000)] = 24
    budget_s: Positive = 60.0
    check: str = ""


def split_words(words: Iterable[str], keys: Mapping[str, Any]) -> tuple[PlanOptions, list[str]]:
    """Returns the options of the plan, and the words that are left for the configuration."""
    known = signature_of(PlanOptions).plain
    kilo = re.compile(r"^(batch|context)=.*")
    words = [re.sub(r"\b(\d+)k\b", _thousands, w) if kilo.match(w) else w for w in words]
    rest, own = read_keys(words, PlanOptions)
    for key, value in keys.items():
        if key not in known:
            raise UserError(f"{key} is no key of a plan: {did_you_mean(key, known)}")
        own[key] = value
    for error in errors_of(PlanOptions, own):
        raise UserError(error)
    own = {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
    return PlanOptions(**own), rest


def _thousands(number: re.Match[str]) -> str:
    return str(1024 * int(number[1]))
