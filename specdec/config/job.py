"""Jobs are checked configurations in the form that the engine takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from operator import itemgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from hydra.core.override_parser.types import Override
from pydantic import Field

from specdec.clocks.build import clock_kind
from specdec.config.hydra import Composed, compose_config, parse
from specdec.config.options import BASES, COMPARE, GROUPS, PARTS, flatten, has_key, options
from specdec.config.profiles import fit, load_profile, with_caveat
from specdec.data import Request, check_data
from specdec.errors import UserError
from specdec.parts.build import build_part, check_values, locate
from specdec.parts.fields import (
    Count,
    Index,
    Positive,
    Text,
    Threads,
    did_you_mean,
    errors_of,
    signature_of,
)

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


_COPYING = (".PromptLookupSource", ".SuffixSource", ".NGramSource")
"""Ends of the class paths of sources that copy from earlier text."""

_NOT_FOR_ENGINE = ("output_dir", *COMPARE)


@dataclass(frozen=True, slots=True)
class Job:
    """One strategy on one workload.

    Attributes:
        config: plain and resolved; its key ``choices`` maps groups to options.
        output_dir: None for the default folder.
        notices: warnings to print before the job starts.
    """

    name: str
    config: dict[str, Any]
    output_dir: str | None
    notices: tuple[str, ...] = ()


def run_job_of(overrides: Sequence[str], extra: Sequence[Path] = ()) -> Job:
    """Composes and checks the job of ``specdec run``."""
    _refuse_foreign_keys(overrides)
    composed = compose_config(overrides, extra=extra)
    if composed.values["strategy"].get("kind") != "parts":
        _refuse_parts(composed, overrides)
    return checked_job(composed)


def checked_job(composed: Composed) -> Job:
    """Checks a composed configuration, adds its latency profile, and makes it a job."""
    values, choices = composed.values, dict(composed.choices)
    check_config(values, choices)
    config = {key: value for key, value in values.items() if key not in _NOT_FOR_ENGINE}
    name = str(config["strategy"]["name"])
    for section, kind in (("clock", clock_kind), ("model", itemgetter("_target_"))):
        if "_target_" in config[section]:  # built-in kinds are in the section already
            config[section] = {"kind": str(kind(config[section])), **config[section]}
    if "profile" in config["clock"] and "_target_" not in config["clock"]:
        config["clock"] = config["clock"] | load_profile(config["clock"]["profile"], composed.trees)
    config = fit(config)
    if config["strategy"]["kind"] != "parts":
        _check_own_decoding(name, config)
        for part in PARTS:
            del config[part]
            choices.pop(part, None)
    choices.pop("strategy", None)
    if config["record"] and config["model"].get("kind") in ("synthetic", "replay"):
        raise UserError(
            f"record=true needs a draft model, which model={choices.get('model')} does not have:"
            " leave it out, or use model=tiny or model=hf"
        )
    _check_turns(config)
    if config["model"].get("kind") == "pretrained":
        check_data(Request.of(**config["data"]))
        num_layers, notices = _check_models(name, config)
    else:
        num_layers, notices = config["model"].get("num_layers", 1), _notices_without_text(config)
    config["clock"] = with_caveat(config, num_layers)
    config["choices"] = choices
    return Job(name, config, values["output_dir"], notices)


def _refuse_foreign_keys(overrides: Sequence[str]) -> None:
    """Refuses keys of other commands, which would have no effect."""
    for override in parse(overrides):
        key = str(override.key_or_group)
        if key in COMPARE:
            raise UserError(f"{override.input_line} is for `specdec compare` only: leave it out")
        if key.partition("/")[0].partition(".")[0] == "hydra":
            raise UserError(
                f"{override.input_line} is for sweeps only: add -m to `specdec run`, or leave it"
                " out (output_dir=DIR names the folder of a run)"
            )


def _refuse_parts(composed: Composed, overrides: Sequence[str]) -> None:
    """Refuses overrides of parts for strategies that another program decodes."""
    name = composed.values["strategy"]["name"]
    for override in parse(overrides):
        part = str(override.key_or_group).split(".")[0]
        if part in PARTS and not (part == "executor" and str(override.value()) == "local"):
            raise UserError(
                f"{override.input_line} does not fit strategy={name}: that is decoding of"
                f" another program, which has no {part}; choose another strategy or leave it out"
            )


def _check_own_decoding(name: str, config: Mapping[str, Any]) -> None:
    executor = str(config["executor"].get("_target_", ""))
    wrong = {
        "executor": not executor.endswith(".LocalExecutor"),
        "clock": config["clock"].get("kind") != "measured",
        "trace": config["trace"],
        "batch_size": config["batch_size"] != 1,
        "model": config["model"].get("kind") not in ("pretrained", "random"),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(
                f"strategy={name} is decoding of another program: one device, one prompt at a time,"
                f" measured time, real models; this {key} does not fit. Leave the strategy or the"
                f" {key} out"
            )


def _check_turns(config: Mapping[str, Any]) -> None:
    at_once = config["serving"].get("arrivals", "at_once") == "at_once"
    if config["data"].get("turns", "first") == "all" and (config["batch_size"] > 1 or not at_once):
        raise UserError(
            "data.turns=all asks a turn after the answer to the one before: use batch_size=1 and"
            " serving.arrivals=at_once, or data.turns=first"
        )


def _check_models(name: str, config: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Checks the models' files, which is faster than loading them.

    Returns the number of the target's layers, and warnings.
    """
    from specdec.models.inspection import inspect_pair

    model, drafts = config["model"], _uses_draft_model(config)
    needed = drafts or config["record"]
    infos = inspect_pair(target=model["target"], draft=model["draft"] if needed else None)
    target = infos["target"]
    check_stages(config, target.num_layers, f"model.target={model['target']}")
    if config["max_new_tokens"] >= target.max_positions:
        raise UserError(
            f"max_new_tokens={config['max_new_tokens']} leaves no room for a prompt in the"
            f" {target.max_positions} positions of model.target={model['target']}: lower it"
        )
    if not needed:
        return target.num_layers, ()
    draft = infos.get("draft")
    if draft is None:
        why = f"strategy={name} drafts with a draft model" if drafts else "record=true needs one"
        raise UserError(
            f"{why}, but model.draft is not set: add"
            " model.draft=PATH_OR_ID, or choose a source without one (source=prompt_lookup)"
        )
    if not 0 < draft.max_positions < target.max_positions:
        return target.num_layers, ()
    return target.num_layers, (
        f"model.draft={model['draft']} has {draft.max_positions} positions, the target"
        f" {target.max_positions}: beyond them nothing is drafted, and all rates count those"
        " tokens too (max_new_tokens and data.max_prompt_tokens limit the length)",
    )


def _notices_without_text(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Warns if a source copies from earlier text and the model's tokens are random."""
    copying = [t for t in _targets(config.get("source", {})) if t.endswith(_COPYING)]
    if not copying or config["model"].get("kind") != "synthetic":
        return ()
    names = " and ".join(dict.fromkeys(target.rpartition(".")[2] for target in copying))
    return (
        f"strategy={config['strategy']['name']}: {names} copies from earlier text, and the tokens"
        " of model=synthetic are random, so it finds next to nothing; its figures say nothing of"
        " the method. Use model=tiny, model=hf, or model=replay with a record of your own pair",
    )


def check_stages(config: Mapping[str, Any], num_layers: int, model: str) -> None:
    """Raises ``UserError`` if there are more pipeline stages than layers of the named model."""
    stages = config.get("executor", {}).get("stages")
    if stages is not None and stages > num_layers:
        raise UserError(
            f"executor.stages={stages} is more than the {num_layers} layers of {model}: choose 1"
            f" to {num_layers}"
        )


def _uses_draft_model(config: Mapping[str, Any]) -> bool:
    if config["strategy"]["kind"] != "parts":
        return str(config["strategy"].get("method")).endswith(("_assisted", "_draft"))
    return any(target.endswith(".DraftModelSource") for target in _targets(config["source"]))


def _targets(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        yield str(node.get("_target_", ""))
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _targets(item)


COMPARISON_FILE = "comparison.json"
"""If this file exists in a folder, the comparison is complete."""


_YARDSTICK_PARTS = ("source", "policy", "verifier")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The checked jobs of ``specdec compare``, one per row.

    Attributes:
        repeats: number of interleaved measurements of every prompt.
        output_dir: None for the default folder.
        notices: overrides that do not apply to every row, and the jobs' notices.
    """

    jobs: tuple[Job, ...]
    repeats: int
    output_dir: str | None
    notices: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        rows = {job.name: job.config for job in self.jobs}
        return {"command": "compare", "repeats": self.repeats, "strategies": rows}


def compose_comparison(overrides: Sequence[str], extra: Sequence[Path] = ()) -> Comparison:
    """Composes and checks every row; an override that applies to no row is a ``UserError``."""
    parsed = parse(overrides)
    if any(o.key_or_group == "strategy" for o in parsed):
        raise UserError(
            "compare takes several presets: write 'strategies=[ar,NAME]', not strategy="
        )
    # Only overrides of parts depend on the row.
    of_parts = {text_of(o): o for o in parsed if _part_of(o)}
    common = [text_of(o) for o in parsed if not _part_of(o)]
    base = compose_config(common, name="compare", extra=extra)
    names = _row_names(base.values["strategies"], extra)
    rows = [_compose_row([f"strategy={name}", *common], of_parts, extra) for name in names]
    check_config(base.values, base.choices)
    if base.values["trace"]:
        raise UserError("trace=true is for one strategy at a time: use it with `specdec run`")
    jobs = [checked_job(row) for row, _ in rows]
    notices, unused = list[str](), list(of_parts)
    for name, (_, left_out) in zip(names, rows, strict=True):
        notices += [f"{text} does not apply to {name}" for text in left_out]
        unused = [text for text in unused if text in left_out]
    if unused:
        raise UserError(_no_row(of_parts[unused[0]], jobs))
    notices += [text for job in jobs for text in job.notices]
    return Comparison(
        tuple(jobs),
        base.values["repeats"],
        base.values["output_dir"],
        tuple(dict.fromkeys(notices)),
    )


def _compose_row(
    common: Sequence[str], of_parts: Mapping[str, Override], extra: Sequence[Path]
) -> tuple[Composed, list[str]]:
    """Composes one row with the overrides that apply to it; also returns those that do not."""
    row = compose_config(common, name="compare", extra=extra)
    fixed = _YARDSTICK_PARTS if row.values["strategy"].get("baseline") else ()
    rest = {text: str(o.key_or_group) for text, o in of_parts.items() if _part_of(o) not in fixed}
    chosen = [text for text, key in rest.items() if key in PARTS]
    has_stages = "executor" in rest.values() or "stages" in row.values["executor"]
    if "executor.stages" in rest.values() and not has_stages:
        chosen.append("executor=pipeline")
    if chosen:
        row = compose_config([*common, *chosen], name="compare", extra=extra)
    values = [
        text
        for text, key in rest.items()
        if key not in PARTS and (of_parts[text].is_add() or has_key(row.values, key))
    ]
    if values:
        row = compose_config([*common, *chosen, *values], name="compare", extra=extra)
    return row, [text for text in of_parts if text not in {*chosen, *values}]


def _row_names(strategies: object, extra: Sequence[Path]) -> list[str]:
    known = options("strategy", extra)
    if not isinstance(strategies, list) or not strategies:
        raise UserError(
            f"strategies={strategies} must be a list of presets, as in 'strategies=[ar,staged]'"
        )
    names = [str(name) for name in strategies]
    for name in names:
        if name not in known:
            raise UserError(f"strategies: {name} is unknown: {did_you_mean(name, known)}")
        if names.count(name) > 1:
            raise UserError(f"strategies={names} names {name} twice: name each row once")
    return names


def _part_of(override: Override) -> str | None:
    """Returns the part whose key an override sets, if any; "strategy" for options of a baseline."""
    key = str(override.key_or_group)
    if key.startswith("strategy.options."):
        return "strategy"
    part = key.split(".")[0]
    return part if part in PARTS else None


def text_of(override: Override) -> str:
    """Returns the word of the command line that an override was parsed from."""
    assert override.input_line is not None, "every override was parsed from a word"
    return override.input_line


def _no_row(override: Override, jobs: Sequence[Job]) -> str:
    part = str(_part_of(override))
    known = {k for job in jobs for k in flatten({part: job.config.get(part, {})})}
    known = {k for k in known if not k.endswith("_target_")}
    hint = did_you_mean(str(override.key_or_group), known)
    return f"{text_of(override)} applies to none of the rows: " + (hint or f"no {part} has keys")
