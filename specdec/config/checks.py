"""Everything that can be found wrong with a configuration before torch is imported."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.clocks.build import clock_kind
from specdec.config.rules import COMPARE, SECTIONS, TOP, Rule
from specdec.config.suggest import did_you_mean
from specdec.errors import UserError
from specdec.parts.signatures import Parameter, parameters

CHECKED_PARTS = ("source", "policy", "verifier")
"""Parts whose keys are the arguments of their class."""

_FILLED = frozenset({"vocab_size", "sample", "prefill_chunk", "latency", "batch_size", "rank"})
"""Plain arguments that follow from the rest of the configuration; ``compose`` passes them."""

_SINGLE_SECTIONS = ("sampling", "data", "serving")  # sections without a kind
_KIND_SECTIONS = ("strategy", "model", "clock", "logger")


def check_config(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Checks keys, types and ranges of a composed configuration.

    Raises:
        UserError: naming the first key that cannot be used, its value and the remedy.
    """
    _check_top(config)
    for section in _SINGLE_SECTIONS:
        _check_section(section, "", config[section])
    for section in _KIND_SECTIONS:
        _check_kind(section, config[section], choices)
    if config["strategy"]["kind"] == "hf":
        _check_hf_options(config["strategy"])
        return
    _check_kind("executor", _with_kind(config["executor"]), choices)
    for part in CHECKED_PARTS:
        check_part(part, config[part], f"{part}={choices.get(part, '...')}")
    check_clock(config)
    _check_layout(config["executor"])


def _check_layout(executor: Mapping[str, Any]) -> None:
    """Checks that the devices of a pipeline fit together."""
    groups, stages = executor.get("groups"), executor.get("stages") or 1
    degree, draft = executor.get("target_degree") or 1, executor.get("draft_degree") or 1
    if groups is not None and degree > 1:
        raise UserError(
            f"executor.groups={groups} has devices work one after the other, and"
            f" executor.target_degree={degree} has them share every layer: set one of the two"
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


def check_clock(config: Mapping[str, Any]) -> None:
    """Checks that the clock, and a trace, suit where the ranks are.

    Raises:
        UserError: several ranks in one process cannot work at the same time by the wall clock.
    """
    kind, executor = clock_kind(config["clock"]), config["executor"]
    in_process = str(executor["_target_"]).endswith(".PipelineExecutor")
    in_process = in_process and executor.get("transport", "in_process") == "in_process"
    if not in_process or kind == "simulated":
        return
    ways = "add executor.transport=distributed, or use clock=simulated or executor=local"
    if kind == "paced":
        raise UserError(f"clock=paced needs a process per stage: {ways}")
    if config["trace"]:
        raise UserError(f"trace=true with clock=measured needs a process per stage: {ways}")


def check_part(path: str, node: object, label: str) -> None:
    """Checks a part and the parts inside it against their classes' signatures.

    Args:
        path: its dotted key, for messages.
        node: its plain config.
        label: how the user chose it.

    Raises:
        UserError: unknown, missing or mistyped key; unknown class.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(f"{path}={node!r} is not a part: it needs _target_, the path of a class")
    known = parameters(node["_target_"])
    plain = {name: p for name, p in known.items() if p.plain and name not in _FILLED}
    if not str(node["_target_"]).startswith("specdec."):  # names of types are the author's own
        free = known.keys() & node.keys() - plain.keys() - _FILLED
        own = {k: known[k] for k in free if known[k].annotation not in ("", "object")}
        plain |= {key: Parameter("", True) for key, p in own.items() if p.annotation.isidentifier()}
    for key, value in node.items():
        if key == "_target_":
            continue
        at = f"{path}.{key}"
        nested = list(_nested(at, value))
        if key not in plain and not (key in known and (nested or not known[key].annotation)):
            hint = did_you_mean(key, plain) or "it takes no keys"
            raise UserError(f"{label} has no key {key!r} (class {node['_target_']}): {hint}")
        if refusal := plain.get(key, known[key]).refusal(value):
            raise UserError(f"{at}={value!r} cannot be used: {refusal}")
        for inner_path, inner in nested:
            check_part(inner_path, inner, f"{label} at {inner_path}")
    missing = [name for name, p in plain.items() if p.required and name not in node]
    if missing:
        raise UserError(
            f"{label} lacks {', '.join(missing)} (class {node['_target_']}): add"
            f" {path}.{missing[0]}=VALUE"
        )


def _nested(path: str, value: object) -> Iterator[tuple[str, object]]:
    """The parts inside a value, with their paths."""
    if isinstance(value, dict) and "_target_" in value:
        yield path, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _nested(f"{path}[{i}]", item)


def _check_top(config: Mapping[str, Any]) -> None:
    rules = {**TOP, **COMPARE}
    sections = {*_SINGLE_SECTIONS, *_KIND_SECTIONS, *CHECKED_PARTS, "executor", "strategies"}
    for key, value in config.items():
        if key in rules:
            _check_value(key, value, rules[key])
        elif key not in sections:
            raise UserError(
                f"{key} is not a key of the configuration: {did_you_mean(key, [*rules, *sections])}"
            )
    for key in (*TOP, *_SINGLE_SECTIONS, *_KIND_SECTIONS):
        if key not in config:
            raise UserError(f"{key} was removed, but every run needs it: leave out ~{key}")


def _check_hf_options(strategy: Mapping[str, Any]) -> None:
    known = parameters("specdec.runs.hf_generate.HFOptions")
    for key, value in strategy["options"].items():
        if key not in known:
            raise UserError(
                f"strategy={strategy['name']} has no option {key!r}: {did_you_mean(key, known)}"
            )
        if refusal := known[key].refusal(value):
            raise UserError(f"strategy.options.{key}={value!r} cannot be used: {refusal}")


def _with_kind(executor: Mapping[str, Any]) -> dict[str, Any]:
    """The executor's section with its class name as the kind."""
    rest = {key: value for key, value in executor.items() if key != "_target_"}
    return {"kind": str(executor.get("_target_", "")).rpartition(".")[2], **rest}


def _check_kind(section: str, node: Any, choices: Mapping[str, str]) -> None:
    if "_target_" in node:
        check_part(section, node, f"{section}={choices.get(section, '...')}")
        return
    kinds = [kind for name, kind in SECTIONS if name == section]
    kind = node.get("kind") if isinstance(node, dict) else None
    if kind not in kinds:
        raise UserError(
            f"{section}={choices.get(section, node)} has kind {kind!r}, which is unknown:"
            f" use one of {', '.join(kinds)}"
        )
    _check_section(section, kind, node)


def _check_section(section: str, kind: str, node: Any) -> None:
    rules = SECTIONS[section, kind]
    if "_target_" in node:  # besides the section's keys, those of the class
        own = parameters(node["_target_"])
        check_part(section, {k: v for k, v in node.items() if k not in rules or k in own}, section)
        node = {key: value for key, value in node.items() if key in rules}
    for key, value in node.items():
        if key == "kind" and kind:
            continue
        if key not in rules:
            hint = did_you_mean(key, rules) or "it has no keys"
            raise UserError(f"{section}.{key} is not a key here: {hint}")
        _check_value(f"{section}.{key}", value, rules[key])
    for key in rules:
        if key not in node:
            raise UserError(f"{section}.{key} is missing: leave out ~{section}.{key}")


def _check_value(key: str, value: object, rule: Rule) -> None:
    if not rule.test(value):
        shown = "null" if value is None else str(value)
        raise UserError(f"{key}={shown} cannot be used: it must be {rule.expects}")


def check_data(data: Mapping[str, Any]) -> None:
    """Checks that the prompts' file is there and readable.

    Raises:
        UserError: naming the file and where to put it.
    """
    from specdec.data import Request
    from specdec.data import check_data as check

    check(Request.of(data))


def uses_draft_model(config: Mapping[str, Any]) -> bool:
    """Whether a checked configuration runs a draft model."""
    if config["strategy"]["kind"] == "hf":
        return bool(config["strategy"]["method"] == "hf_assisted")
    return any(
        str(node["_target_"]).endswith(".DraftModelSource") for node in _parts(config["source"])
    )


def _parts(node: Any) -> Iterator[Mapping[str, Any]]:
    """A part and every part inside it."""
    if isinstance(node, dict) and "_target_" in node:
        yield node
        for value in node.values():
            yield from _parts(value)
    elif isinstance(node, list):
        for item in node:
            yield from _parts(item)


def check_logger(logger: Mapping[str, Any]) -> None:
    """Finds out before a long run whether its results can be logged after it.

    Raises:
        UserError: wandb is not installed.
    """
    if logger.get("kind") == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "logger=wandb needs the package wandb, which is not installed: run"
            " pip install 'specdec-lab[wandb]', or leave logger=wandb out"
        )
