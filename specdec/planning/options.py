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
"""Value of ``profile`` by which a plan measures its models on this machine."""

_Counts = Annotated[
    tuple[Count, ...],
    Field(min_length=1),
    expects("it must be whole numbers of at least 1, as in 1,4,16 or 512,8k"),
]


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    profile: Annotated[
        Text | None,
        "name or file of a latency profile, a described machine (docs/plan.md), or measured: here",
    ] = None
    devices: Annotated[Count | None, "in total; by default those of the profile"] = None
    link_ms: Annotated[NotNegative | None, "of a transfer, in place of the profile's"] = None
    link_gb_s: Annotated[Positive | None, "likewise, of a described machine"] = None
    batch: Annotated[
        _Counts, "1,4,16: requests at a time; the first is ranked, all are in the tables"
    ] = (1,)
    context: Annotated[_Counts, "512,8k: tokens before the output"] = (512,)
    objective: Annotated[
        Literal["latency", "throughput", "per_device"],
        "time per token of a request; throughput: tokens per second; per_device",
    ] = "latency"
    acceptance: Annotated[Text | None, "the log of an engine, in place of a law"] = None
    method: Annotated[Text | None, "of the log, as for fit"] = None
    draft_tokens: Annotated[Count | None, "likewise"] = None
    strategies: Annotated[tuple[Text, ...], "[A,B]: presets to try"] = ()
    prompts: Annotated[int, Field(ge=4, le=1000), "of the last round"] = 24
    budget_s: Annotated[Positive, "seconds in all, measuring included"] = 120.0
    check: Annotated[
        str, "DIR: compares a run of the planned preset with the plan; true: runs it"
    ] = ""


def split_words(words: Iterable[str], keys: Mapping[str, Any]) -> tuple[PlanOptions, list[str]]:
    known = signature_of(PlanOptions).plain
    words = [
        re.sub(r"\b(\d+)k\b", lambda kilo: str(1024 * int(kilo[1])), word)
        if word.startswith(("batch=", "context="))
        else word
        for word in words
    ]
    rest, own = read_keys(words, PlanOptions)
    for key, value in keys.items():
        if key not in known:
            raise UserError(f"{key} is no key of a plan: {did_you_mean(key, known)}")
        own[key] = value
    for error in errors_of(PlanOptions, own):
        raise UserError(error)
    own = {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
    return PlanOptions(**own), rest
