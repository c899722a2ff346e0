"""Checks the keys of every section of the configuration before any model is loaded.

Types and bounds are the annotations of the function or class that takes a section, or of the class
that its ``_target_`` names. Only keys that no single constructor takes have their types here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import make_dataclass
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.clocks.build import clock_kind
from specdec.config.options import BASES, COMPARE, GROUPS, PARTS
from specdec.errors import UserError
from specdec.parts.build import build_part, check_values, locate
from specdec.parts.fields import Count, Index, Positive, Text, Threads, errors_of, signature_of

_RUN: dict[str, Any] = {
    "max_new_tokens": Count,
    "stop_strings": list[Annotated[str, Field(min_length=1, max_length=200)]],
    "ignore_eos": bool,
    "seed": Index,
    "batch_size": Count,
    "prefill_chunk": Count,
    "trace": bool,
    "threads": Threads | None,
    "record": bool,
    "output_dir": Text | None,
}


def _keys(**hints: Any) -> type:
    return make_dataclass("Keys", hints.items())


_KEYS, _COMPARE = _keys(**_RUN), _keys(**_RUN, **COMPARE)
_PRESET = {"name": Text, "title": Text, "baseline": bool}
_HF = Literal["hf_generate", "hf_assisted", "hf_prompt_lookup"]
_ORT = Literal["ort_generate", "ort_draft", "ort_lookup"]
_LLAMA = Literal["llamacpp_generate", "llamacpp_draft", "llamacpp_ngram"]
_RIVAL = _ORT | _LLAMA | Literal["openvino_generate", "openvino_draft", "openvino_lookup"]
_PROFILED = _keys(profile=Text, scale=Positive)

_TAKERS: dict[str, str | type] = {
    "strategy=parts": _keys(**_PRESET),
    "strategy=hf": _keys(**_PRESET, method=_HF, options=dict[str, Any]),
    "strategy=rival": _keys(**_PRESET, method=_RIVAL, options=dict[str, Any]),
    "strategy=endpoint": _keys(**_PRESET, options=dict[str, Any]),
    "options of hf": "specdec.runs.hf_generate.HFOptions",
    "options of rival": "specdec.runs.rival.RivalOptions",
    "options of endpoint": "specdec.rivals.endpoint.EndpointOptions",
    "sampling": "specdec.sampling.transform.SamplingParams",
    "serving": "specdec.serving.rules.ServingRules.of",
    "data": "specdec.data.request.DataOptions",
    "clock=measured": _keys(),
    "clock=simulated": _PROFILED,
    "clock=paced": _PROFILED,
    "logger=none": _keys(),
    "logger=wandb": "specdec.cli.loggers.WandbLogger",
    "model=pretrained": "specdec.pairs.pretrained.build_pretrained",
    "model=random": "specdec.pairs.random.build_random",
    "model=synthetic": "specdec.pairs.recorded.build_synthetic",
    "model=replay": "specdec.pairs.recorded.build_replay",
    "profiling": "specdec.profiling.trees.ProfilingOptions",
}
"""Section (with ``kind`` or ``_target_`` if it has several) -> class or function for its keys."""

_UNSTATED = {"logit_scale", "logit_step"}  # of RandomPair: only certification passes them


def check_config(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Raises ``UserError`` for the first key that is unknown or has a bad type or value."""
    top = {key: value for key, value in config.items() if key not in GROUPS}
    check_values(_COMPARE if "strategies" in top else _KEYS, top, also=GROUPS)
    strategy: Any = config.get("strategy")
    has_parts = isinstance(strategy, dict) and strategy.get("kind") == "parts"
    for section in GROUPS:
        if has_parts or section not in PARTS:
            check_section(section, config.get(section), choices)
    if not has_parts:
        taker = _TAKERS[f"options of {strategy['kind']}"]
        check_values(_resolved(taker), strategy["options"], "strategy.options")
    else:
        cls: Any = locate(config["executor"]["_target_"], "executor")
        keys = {key: value for key, value in config["executor"].items() if key != "_target_"}
        cls.check(keys, clock_kind(config["clock"]), tracing=config["trace"])


def check_section(section: str, node: Any, choices: Mapping[str, str]) -> None:
    """Checks the keys of a section, and that its ``_target_`` is a class of the right kind."""
    label = f"{section}={choices[section]}" if section in choices else section
    if not isinstance(node, dict):
        raise UserError(f"{label} is not a section: give it an option's keys, or drop ~{section}")
    values = {key: value for key, value in node.items() if key not in ("kind", "_target_")}
    common, base = _resolved(_TAKERS.get(section)), _resolved(BASES.get(section))
    kind = node.get("_target_", node.get("kind"))
    taker = _resolved(_TAKERS.get(f"{section}={kind}"))
    if "_target_" not in node:
        taker = taker or common
    elif section == "executor":  # whose keys are arguments of the first phase
        cls: Any = locate(kind, section, base)
        taker = cls.options or cls.plan
    if taker is not None:
        also = ("path",) if kind == "pretrained" else ()  # only model=gguf has it
        complete = section != "executor"
        check_values(taker, values, section, label, given=_UNSTATED, also=also, complete=complete)
    elif base and ("_target_" in node or section in PARTS):
        keys = signature_of(common).plain if common else ()
        build_part(node, None, section, base, label=label, known=keys)
        for error in errors_of(common, node, f"{section}.") if common else ():
            raise UserError(error)
    else:
        known = ", ".join(k.partition("=")[2] for k in _TAKERS if k.startswith(f"{section}="))
        raise UserError(f"{label} has kind {str(kind)!r}, which is unknown: use one of {known}")


def _resolved(path: str | type | None) -> Any:
    return resolve_name(path) if isinstance(path, str) else path
