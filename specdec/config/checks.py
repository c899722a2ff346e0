"""Checks of a composed configuration, before any model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from specdec.clocks.build import check_in_process, clock_kind
from specdec.config.schema import PROGRAM_ONLY, PROTOCOLS, kinds_of, model_for
from specdec.errors import UserError
from specdec.parts.build import check_keys, check_part, locate
from specdec.parts.fields import names_of

_PARTS = ("executor", "source", "policy", "verifier")
_SECTIONS = ("strategy", "model", "data", "sampling", "serving", "clock", "logger")


def check_config(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Checks keys, types and bounds of a composed configuration.

    Raises:
        UserError: naming the first key that cannot be used, its value and the remedy.
    """
    sections = (*_SECTIONS, *_PARTS)
    top = {key: value for key, value in config.items() if key not in sections}
    model = model_for("", "compare" if "strategies" in top else "")
    assert model is not None
    keys = names_of(model)
    check_keys(model, top, "", "the configuration", names=(*keys, *sections), required=keys)
    for section in _SECTIONS:
        if section not in config:
            raise UserError(f"{section} was removed, but every run needs it: leave out ~{section}")
        check_section(section, config[section], choices)
    if config["strategy"].get("kind") == "hf":
        check_section("strategy.options", config["strategy"]["options"], choices)
        return
    for part in _PARTS:
        check_section(part, config.get(part), choices)
    executor = dict(config["executor"])
    if str(executor.pop("_target_")).endswith(".PipelineExecutor"):
        from specdec.executors.layout import PipelineOptions  # torch comes with its package

        if executor["transport"] == "in_process":
            check_in_process(clock_kind(config["clock"]), tracing=config["trace"])
        PipelineOptions(**executor).layout(default_stages=1)


def check_section(section: str, node: Any, choices: Mapping[str, str]) -> None:
    """Checks a section against the model of its kind or the signature of its ``_target_``.

    Raises:
        UserError: a class that does not fit; an unknown, missing or mistyped key.
    """
    label = f"{section}={choices[section]}" if section in choices else section
    if not isinstance(node, dict):
        raise UserError(f"{label} is not a section: give it the keys of one of its options")
    values = {key: value for key, value in node.items() if key not in ("kind", "_target_")}
    common = model_for(section)
    kind = str(node.get("_target_", "" if common else node.get("kind")))
    if model := model_for(section, kind):
        names = [name for name in names_of(model) if name not in PROGRAM_ONLY]
        required = () if section == "strategy.options" else names
        check_keys(model, values, f"{section}.", label, names=names, required=required)
    elif section in PROTOCOLS and ("_target_" in node or section in _PARTS):
        standard = () if common is None else names_of(common)
        check_part(node, section, label, protocol_of(section), standard)
        if common:
            known = {key: value for key, value in values.items() if key in standard}
            check_keys(common, known, f"{section}.", label, names=standard)
    else:
        known_kinds = ", ".join(kinds_of(section))
        raise UserError(f"{label} has kind {kind!r}, which is unknown: use one of {known_kinds}")


def protocol_of(section: str) -> type | None:
    """The Protocol that the class of a section's ``_target_`` must implement."""
    path = PROTOCOLS.get(section)
    protocol: type | None = resolve_name(path) if path else None
    return protocol


def check_targets(config: Mapping[str, Any]) -> None:
    """Checks the class of every ``_target_`` of a resolved configuration, before one is called.

    Raises:
        UserError: a class that lacks methods of its Protocol.
    """
    for section, node in config.items():
        if isinstance(node, dict) and "_target_" in node:
            locate(node["_target_"], section, protocol_of(section))
