"""Jobs are checked configurations in the form that the engine takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from specdec.clocks.build import clock_kind
from specdec.config.checks import check_config
from specdec.config.hydra import Composed, compose_config, parse
from specdec.config.options import COMPARE, PARTS
from specdec.config.profiles import fit, load_profile, with_caveat
from specdec.data import Request, check_data
from specdec.errors import UserError

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
    if values["logger"].get("kind") == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError(  # now rather than at the end of a long run, when results are logged
            "logger=wandb needs the package wandb, which is not installed: run"
            " pip install 'specdec-lab[wandb]', or leave logger=wandb out"
        )
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
