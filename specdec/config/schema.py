"""The keys of every section of the configuration.

Their types and bounds are the annotations of the class or function that takes a section; a section
with a ``_target_`` is checked against that class (``parts.build``). Only what no single constructor
takes has its types here.
"""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.parts.fields import Count, Index, Model, Positive, Text, model_of, signature_of

PROTOCOLS = {
    "source": "specdec.interfaces.TokenSource",
    "policy": "specdec.interfaces.TreePolicy",
    "verifier": "specdec.interfaces.Verifier",
    "executor": "specdec.interfaces.Executor",
    "serving": "specdec.interfaces.Scheduler",
    "logger": "specdec.interfaces.Logger",
    "clock": "specdec.clocks.Clock",
    "model": "specdec.pairs.ModelPair",
    "data": "specdec.data.DataReader",
}
"""Section -> Protocol that the class of its ``_target_`` must implement."""

_StopString = Annotated[str, Field(min_length=1, max_length=200)]
_TITLES = {"name": Text, "title": Text, "baseline": bool}
_PROFILED = {"profile": Text, "scale": Positive}

_TOP: dict[str, Any] = {
    "max_new_tokens": Count,
    "stop_strings": list[_StopString],
    "ignore_eos": bool,
    "seed": Index,
    "batch_size": Count,
    "prefill_chunk": Count,
    "trace": bool,
    "threads": Count | None,
    "record": bool,
    "output_dir": Text | None,
}
COMPARE: dict[str, Any] = {
    "strategies": list[str],
    "repeats": Count,
    "curve_profile": Text,
    "cross_profile": Text | None,
    "curve_replay": bool,
}
"""Top-level keys of ``specdec compare`` alone."""

_SECTIONS: dict[tuple[str, str], str | dict[str, Any]] = {
    ("", ""): _TOP,
    ("", "compare"): {**_TOP, **COMPARE},
    ("strategy", "parts"): _TITLES,
    ("strategy", "hf"): {
        **_TITLES,
        "method": Literal["hf_generate", "hf_assisted", "hf_prompt_lookup"],
        "options": dict[str, Any],
    },
    ("strategy.options", ""): "specdec.runs.hf_generate.HFOptions",
    ("sampling", ""): "specdec.sampling.transform.SamplingParams",
    ("serving", ""): "specdec.serving.rules.ServingRules.of",
    ("data", ""): "specdec.data.request.DataOptions",
    ("clock", "measured"): {},
    ("clock", "simulated"): _PROFILED,
    ("clock", "paced"): _PROFILED,
    ("logger", "none"): {},
    ("logger", "wandb"): "specdec.cli.loggers.WandbLogger",
    ("model", "pretrained"): "specdec.pairs.PretrainedPair",
    ("model", "random"): "specdec.pairs.RandomPair",
    ("model", "synthetic"): "specdec.pairs.build_synthetic",
    ("model", "replay"): "specdec.pairs.build_replay",
    ("executor", "specdec.executors.LocalExecutor"): {},
    ("executor", "specdec.executors.EarlyExitExecutor"): {"stages": Count | None},
    ("executor", "specdec.executors.PipelineExecutor"): "specdec.executors.layout.PipelineOptions",
    ("profiling", ""): "specdec.profiling.options.ProfilingOptions",
}
"""(section, its ``kind`` or ``_target_``, "" without kinds) -> the callable that takes it, or its
keys."""

PROGRAM_ONLY = ("logit_scale", "logit_step")
"""Plain arguments of ``RandomPair`` that only certification passes."""


@cache
def model_for(section: str, kind: str = "") -> Model | None:
    """The pydantic model of a section's keys without ``kind`` and ``_target_``; None if unknown."""
    entry = _SECTIONS.get((section, kind))
    if isinstance(entry, str):
        return signature_of(resolve_name(entry)).model
    return None if entry is None else model_of({key: (hint, True) for key, hint in entry.items()})


def kinds_of(section: str) -> list[str]:
    """The kinds of a section."""
    return [kind for name, kind in _SECTIONS if name == section]
