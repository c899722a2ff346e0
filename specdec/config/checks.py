"""Checks of a composed configuration, before any model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specdec import data
from specdec.clocks.build import clock_kind
from specdec.config.schema import COMPARE, SECTIONS, TOP
from specdec.errors import UserError
from specdec.parts.build import check_part, locate
from specdec.parts.fields import Model, errors_of, model_of, names_of
from specdec.parts.suggest import did_you_mean

_PARTS = ("source", "policy", "verifier")
_CLOSED = ("strategy", "sampling", "profiling")  # no class of your own goes there
_SECTIONS = ("strategy", "model", "data", "sampling", "serving", "clock", "logger")


def protocol_of(section: str) -> type | None:
    """The Protocol that the class of a section's ``_target_`` must implement.

    Imports it here, not with this module, since torch and transformers come with it.
    """
    if section == "model":
        from specdec.pairs.interface import ModelPair

        return ModelPair
    if section == "data":
        return data.DataReader
    from specdec import clocks, interfaces

    names = {"policy": "TreePolicy", "source": "TokenSource", "serving": "Scheduler"}
    name = names.get(section, section.title())
    return getattr(clocks if section == "clock" else interfaces, name, None)


def check_config(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Checks keys, types and bounds of a composed configuration.

    Raises:
        UserError: naming the first key that cannot be used, its value and the remedy.
    """
    sections = {*_SECTIONS, *_PARTS, "executor"}
    own = {key: value for key, value in config.items() if key not in sections}
    hints = {**TOP, **(COMPARE if "strategies" in own else {})}
    _check_keys(model_of({k: (hint, True) for k, hint in hints.items()}), own, "", sections)
    for section in _SECTIONS:
        if section not in config:
            raise UserError(f"{section} was removed, but every run needs it: leave out ~{section}")
        check_section(section, config[section], choices)
    if config["strategy"].get("kind") == "hf":
        options = config["strategy"]["options"]
        node = {**options, "_target_": "specdec.runs.hf_generate.HFOptions"}
        check_part(node, "strategy.options", "strategy.options")
        return
    for part in ("executor", *_PARTS):
        check_section(part, config.get(part), choices)
    check_clock(config)
    _check_layout(config["executor"])


def check_section(section: str, node: Any, choices: Mapping[str, str]) -> None:
    """Checks a section against the model of its kind or the signature of its ``_target_``.

    Raises:
        UserError: a class that does not fit; an unknown, missing or mistyped key.
    """
    label = f"{section}={choices.get(section, '...')}"
    if not isinstance(node, dict):
        raise UserError(f"{label} is not a section: give it the keys of one of its options")
    fixed = SECTIONS.get((section, ""))
    kind = str(node.get("_target_", "" if fixed else node.get("kind")))
    if (section, kind) in SECTIONS:
        values = {k: v for k, v in node.items() if k not in ("kind", "_target_")}
        _check_keys(SECTIONS[section, kind], values, f"{section}.")
    elif section in _PARTS or ("_target_" in node and section not in _CLOSED):
        standard = () if fixed is None else names_of(fixed)
        check_part(node, section, label, protocol_of(section), standard)
        rest = {k: v for k, v in node.items() if k in standard}
        _check_keys(fixed or model_of({}), rest, f"{section}.", partial=True)
    else:
        kinds = ", ".join(name for group, name in SECTIONS if group == section)
        raise UserError(f"{label} has kind {kind!r}, which is unknown: use one of {kinds}")


def _check_keys(
    model: Model,
    values: Mapping[str, Any],
    where: str,
    also: Iterable[str] = (),
    *,
    partial: bool = False,
) -> None:
    for key, error in errors_of(model, values, where):
        if error == "unknown":
            hint = did_you_mean(key, [*names_of(model), *also]) or "it has no keys"
            raise UserError(f"{where}{key} is not a key of the configuration: {hint}")
        if error != "missing":
            raise UserError(error)
        if not partial:
            raise UserError(f"{where}{key} is missing: leave out ~{where}{key}")


def check_targets(config: Mapping[str, Any]) -> None:
    """Checks the class of every ``_target_`` of a resolved configuration, before one is called.

    Raises:
        UserError: a class that lacks methods of its Protocol.
    """
    for section, node in config.items():
        if isinstance(node, dict) and "_target_" in node:
            locate(node["_target_"], section, protocol_of(section))


def check_clock(config: Mapping[str, Any]) -> None:
    """Checks that a pipeline in one process has a clock and a trace that can be right.

    Raises:
        UserError: its ranks take turns, so measured and paced times would mean nothing.
    """
    kind, executor = clock_kind(config["clock"]), config["executor"]
    if not str(executor["_target_"]).endswith(".PipelineExecutor") or kind == "simulated":
        return
    if executor.get("transport", "in_process") != "in_process":
        return
    ways = "add executor.transport=distributed, or use clock=simulated or executor=local"
    if kind == "paced":
        raise UserError(f"clock=paced needs a process per stage: {ways}")
    if config["trace"]:
        raise UserError(f"trace=true with clock=measured needs a process per stage: {ways}")


def _check_layout(executor: Mapping[str, Any]) -> None:
    groups, stages = executor.get("groups"), executor.get("stages") or 1
    degree, draft = executor.get("target_degree") or 1, executor.get("draft_degree") or 1
    if groups is not None and degree > 1:
        raise UserError(
            f"executor.groups={groups} prices several devices per stage one after another, and"
            f" executor.target_degree={degree} makes them share every layer: set one of the two"
        )
    if executor.get("shared") and draft > degree * stages:
        raise UserError(
            f"executor.shared=true puts the draft on the target's {degree * stages} devices, which"
            f" are fewer than executor.draft_degree={draft}: lower it"
        )
    if groups is not None and len(groups) != stages:
        raise UserError(
            f"executor.groups={groups} names {len(groups)} stages, but executor.stages={stages}:"
            " give one number of devices per stage"
        )
