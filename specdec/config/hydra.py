"""Composes configurations from overrides; Hydra's errors become one line with a suggestion."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.config.options import (
    CONFIG_DIR,
    GROUPS,
    YAML_ERRORS,
    Trees,
    config_tree,
    has_key,
    options,
    own_values,
    read_yaml,
)
from specdec.errors import UserError
from specdec.files import flatten
from specdec.parts.build import FILLED, locate
from specdec.parts.fields import did_you_mean, errors_of, signature_of

Words = Sequence[str]  # overrides in Hydra's grammar

_FAULTS = (HydraException, OmegaConfBaseException, TypeError, ValueError)
"""Errors that Hydra raises for bad overrides; the last two if a group is null or a number."""


_ELSEWHERE = {  # word that is no key -> where its value is given
    "prompt": "prompts are data=text data.path=FILE, or specdec.generate(PROMPT) in Python",
    "checks": "they can be chosen in Python, specdec.verify(..., checks=[...])",
}


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration: its resolved values, the option chosen in each group, and the
    configuration trees that were searched besides the library's own.
    """

    values: dict[str, Any]
    choices: dict[str, str]
    trees: tuple[Path, ...] = ()

    def unknown_key(self, override: Override) -> str:
        """Returns the message for an override of a key that this configuration lacks."""
        key = key_of(override)
        group, _, rest = key.partition(".")
        if not (rest and group in self.choices):
            known = [*flatten(self.values), *GROUPS]
            hint = _ELSEWHERE.get(key) or did_you_mean(key, known)
            return f"{key} is not a key of the configuration: {hint}".rstrip(": ")
        message = f"{group}={self.choices[group]} has no key {rest!r}: "
        section = self.values.get(group, {})
        if "_target_" in section and group != "executor":
            plain_keys = signature_of(locate(section["_target_"], group)).plain.keys()
            if rest in plain_keys - FILLED.get(group, set()):
                return f"{message}write +{override.input_line}, or add the key to its YAML"
        own = [k for k in flatten(section) if not k.endswith("_target_")]
        paths = options(group, self.trees).items()
        if others := [f"{group}={option}" for option, path in paths if _states(path, rest)]:
            return f"{message}it is a key of {', '.join(others)}"
        return message + (did_you_mean(rest, own) or "it has none, so leave it out")


def check_lists(**values: Any) -> None:
    """Raises UserError for an argument of a Python function that is no list of texts or paths."""
    for name, given in values.items():
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not (is_list and all(isinstance(item, str | Path) for item in given)):
            raise UserError(f"{name}={given!r} must be a list of texts, as in {name}=['TEXT']")


def parse(overrides: Words) -> list[Override]:
    parsed: list[Override] = []
    for text in overrides:
        try:
            if text.startswith("="):  # Hydra would accept a group without a name
                raise ValueError("no key")
            parsed += OverridesParser.create().parse_overrides([text])
        except (HydraException, ValueError, RecursionError) as error:
            for group in GROUPS if text.isidentifier() else ():
                if text in options(group):
                    message = f"{text} alone says too little: write {group}={text}"
                    raise UserError(message) from error
            raise UserError(
                f"cannot read the argument {text[:200]!r}: write key=value without spaces"
                " around the equals sign, and put values with special characters in quotes inside"
                " quotes, as in 'data.path=\"my file.txt\"'"
            ) from error
    return parsed


def key_of(override: Override) -> str:
    return str(override.key_or_group)


def read_keys(words: Words, schema: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Returns the words that set no parameter of ``schema``, and the values that other words set.
    Values of text parameters are taken literally, and lists need no brackets.
    """
    keys, others, values = signature_of(schema).plain, list[str](), dict[str, Any]()
    for word in words:
        key, _, text = word.partition("=")
        if key not in keys:
            others.append(word)
            continue
        types = json.dumps(keys[key].json_schema())
        (override,) = parse([f"{key}=[{text.strip('[]')}]" if '"array"' in types else word])
        value = override.value()
        is_text = '"string"' in types and not isinstance(value, str | list | None)
        values[key] = text if is_text else value
    for error in errors_of(schema, values):
        raise UserError(error)
    return others, values


def compose_config(overrides: Words, *, name: str = "config", extra: Trees = ()) -> Composed:
    """Composes the root file ``name`` with overrides into a configuration of resolved values."""
    return plain(compose_raw(overrides, name=name, extra=extra), extra)


def compose_raw(overrides: Words, *, name: str = "config", extra: Trees = ()) -> DictConfig:
    for override in parse(overrides):
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line} has several values: add -m to `specdec run` to sweep over"
                " them, or write a list in brackets, as in 'strategies=[ar,speculative]'"
            )
        word, named = str(override.input_line), override.value()
        # If no tree has the group, Hydra takes this for a key.
        if word == f"+experiment={named}" and not options("experiment", extra):
            file = f"experiment/{named}.yaml in a folder that --config-dir names"
            raise UserError(f"{word} needs the file {file}")
    try:
        raw = _hydra_compose(overrides, name, extra)
    except (*_FAULTS, *YAML_ERRORS) as error:
        if text := isinstance(error, _FAULTS) and _explain(error, overrides, name, extra):
            raise UserError(text) from error
        for tree in extra:  # a file that cannot be read explains any other error
            for path in sorted(Path(tree).rglob("*.yaml")):
                read_yaml(path, f"{path} cannot be read", "correct it, or remove it from the tree")
        if not isinstance(error, _FAULTS):
            raise
        text = f"the configuration cannot be composed: {_first_line(error)}"
        raise UserError(text) from error
    preset = raw.hydra.runtime.choices.get("strategy")
    if preset and "kind" not in raw.get("strategy", {}):
        raise UserError(
            f"strategy={preset} has no strategy.kind: its YAML needs '# @package _global_' as its"
            " first line and a section 'strategy:', as in docs/adding.md"
        )
    return raw


def combinations(overrides: Sequence[Override], extra: Trees = ()) -> list[list[str]]:
    values: dict[str, list[str]] = {}  # if a key is repeated, its last value counts
    for override in overrides:
        key, value = override.get_key_element(), override.value()
        if isinstance(value, Glob):
            names = value.filter(list(options(key_of(override), extra)))
            values[key] = [f"{key}={name}" for name in names]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={text}" for text in override.sweep_string_iterator()]
        elif override.is_sweep_override():
            remedy = f"give the values, as in {key}=1,2,3"
            raise UserError(f"{override.input_line} is an interval: {remedy}")
        else:
            values[key] = [override.input_line or ""]
    return [list(job) for job in product(*values.values())]


def plain(raw: DictConfig, trees: Trees = ()) -> Composed:
    chosen: Any = OmegaConf.to_container(raw.hydra.runtime.choices)
    choices = {group: str(chosen[group]) for group in GROUPS if group in chosen}
    config = OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])
    for key, value in flatten(OmegaConf.to_container(config)).items():
        if value == "???":
            group = key.split(".")[0]
            option = f"{group}={choices.get(group, '...')}"
            raise UserError(f"{key} has no value and {option} needs one: add {key}=VALUE")
    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {_first_line(error)}") from error
    for key, value in flatten(values).items():
        bits = 64 if key.endswith("seed") else 63
        if isinstance(value, int) and value >= 1 << bits:
            reason = f"{key} is a whole number of more than {bits} bits"
            raise UserError(f"the configuration cannot be used ({reason}): give another value")
    return Composed({str(k): v for k, v in values.items()}, choices, tuple(trees))


def without_hydra(overrides: Words) -> list[str]:
    return [o for o in overrides if not o.lstrip("+~").startswith(("hydra.", "hydra/"))]


def search_path(extra: Trees) -> list[str]:
    trees = ",".join(f"file://{config_tree(tree).resolve().as_posix()}" for tree in extra)
    return [f"hydra.searchpath=[{trees}]"] if trees else []


def _hydra_compose(overrides: Words, name: str, extra: Trees) -> DictConfig:
    words = [*search_path(extra), *overrides]
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
        return compose(config_name=name, overrides=words, return_hydra_config=True)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")


def _explain(error: Exception, overrides: Words, name: str, extra: Trees) -> str:
    """Returns what is wrong and the remedy; "" if the overrides do not explain the error."""
    if isinstance(error, MissingConfigException):
        group, _, value = str(error.missing_cfg_file).rpartition("/")
        plugin = value.partition("_")[0]
        if group == "hydra/launcher" and plugin in ("joblib", "submitit"):
            return f"{group}={value} needs a package: pip install hydra-{plugin}-launcher"
        if group in ("experiment", "hydra/launcher", "hydra/sweeper"):
            return f"{group}={value} is unknown: {did_you_mean(value, error.options or ())}"
    if file := re.match(r"In '(.+)': Could not override '\w+@", str(error)):
        return (
            f"{file[1]}.yaml chooses parts, for which its first line must be `# @package _global_`"
        )
    parsed = parse(overrides)
    groups = [o for o in parsed if o.key_or_group in GROUPS]
    for override in groups:
        group, value = key_of(override), str(override.value())
        if str(error).startswith(f"Could not override '{group}'. No match in the defaults"):
            return f"{override.input_line} does not apply to this command: leave it out"
        if not isinstance(override.value(), dict | list) and value not in options(group, extra):
            unknown = f"{override.input_line} is unknown: "
            others = [f"{g}={value}" for g in GROUPS if value in options(g, extra)]
            if others and value != "none":
                return f"{unknown}{value} is no {group}; write {' or '.join(others)}"
            hint = did_you_mean(value, options(group, extra))
            if group == "model" and not hint.startswith("did"):
                hint = f"for a model of your own write model=hf model.target={value}; or {hint}"
            return f"{unknown}{hint}"
    if found := re.match(r"In '.+': Could not find '(\w+)/(.+)'", str(error)):
        hint = did_you_mean(found[2], options(found[1], extra))
        return f"{found[1]}={found[2]}, which a YAML file chooses, is unknown: {hint}"
    groups += [o for o in parsed if key_of(o).startswith("hydra/")]
    try:
        raw = _hydra_compose([str(o.input_line) for o in groups], name, extra)
        base = plain(raw, extra)
    except (*_FAULTS, *YAML_ERRORS):
        return ""
    for override in parsed:
        key = key_of(override)
        if key == "experiment" and not override.is_add():
            return f"{override.input_line} adds a group: write +{override.input_line}"
        if override in groups or override.is_add():
            continue
        if key.startswith("hydra."):
            known = flatten(OmegaConf.to_container(raw.hydra), "hydra")
            near = [k for k in known if k.rpartition(".")[0] == key.rpartition(".")[0]]
            if not has_key(known, key):
                hint = did_you_mean(key, [k for k in near if not k.endswith("_target_")])
                hint = hint or "leave it out, or choose another hydra/launcher"
                return f"{key} is not a key of Hydra here: {hint}"
        elif not has_key(base.values, key):
            return base.unknown_key(override)
    return ""


def _states(path: Path, key: str) -> bool:
    try:
        return key in own_values(path)
    except UserError:  # of a file that cannot be read
        return False
