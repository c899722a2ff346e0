"""From overrides to a plain dict, with errors that say what was meant.

Hydra composes; when it refuses, the overrides are looked at one by one to find the wrong word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from specdec.config.options import GROUPS, config_dir, flatten, options, own_values
from specdec.errors import UserError
from specdec.parts.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration.

    Attributes:
        values: plain, resolved.
        choices: group -> chosen option.
        trees: further configuration trees that were searched.
    """

    values: dict[str, Any]
    choices: dict[str, str]
    trees: tuple[Path, ...] = ()


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides one by one.

    Raises:
        UserError: naming the first one that is not of Hydra's grammar.
    """
    parsed: list[Override] = []
    parser = OverridesParser.create()
    for text in overrides:
        try:
            if text.startswith("="):  # Hydra takes it for a group without a name
                raise OverrideParseException(text, "no key")
            parsed += parser.parse_overrides([text])
        except (OverrideParseException, HydraException) as error:
            raise UserError(
                f"cannot read the argument {text!r}: write key=value without spaces around the"
                " equals sign, and put values with special characters in quotes inside quotes, as"
                " in 'data.path=\"my file.txt\"'"
            ) from error
    return parsed


def compose_config(
    overrides: Sequence[str], *, name: str = "config", extra: Sequence[Path] = ()
) -> Composed:
    """Composes the tree's ``name`` with overrides.

    Args:
        overrides: as on the command line, no sweeps.
        name: root of the tree: config or compare.
        extra: further trees to search.

    Raises:
        UserError: unknown group option or key, value that is missing, malformed override.
    """
    for override in parse(overrides):
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line} names several values: add -m to `specdec run` to sweep"
                " over them, or put a list in brackets, as in 'strategies=[ar,speculative]'"
            )
    try:
        raw = _hydra_compose(overrides, name, extra)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, overrides, name, extra) from error
    return replace(plain(raw), trees=tuple(extra))


def plain(raw: DictConfig) -> Composed:
    """Resolves what Hydra composed (``hydra`` node included) into plain values and choices.

    Raises:
        UserError: a value that must be given is missing, or an interpolation fails.
    """
    chosen = OmegaConf.to_container(raw.hydra.runtime.choices)
    assert isinstance(chosen, dict)
    choices = {group: str(chosen[group]) for group in GROUPS if group in chosen}
    config = OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or "a key"
        group = key.split(".")[0]
        raise UserError(
            f"{key} has no value and {group}={choices.get(group, '...')} needs one: add {key}=VALUE"
        ) from error
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {_first_line(error)}") from error
    assert isinstance(values, dict)
    return Composed({str(k): v for k, v in values.items()}, choices)


def _hydra_compose(overrides: Sequence[str], name: str, extra: Sequence[Path]) -> DictConfig:
    search = ",".join(f"file://{Path(p).resolve().as_posix()}" for p in extra)
    asked = [*([f"hydra.searchpath=[{search}]"] if search else []), *overrides]
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        return compose(config_name=name, overrides=asked, return_hydra_config=True)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")


def _explain(
    error: Exception, overrides: Sequence[str], name: str, extra: Sequence[Path]
) -> UserError:
    """Finds the override that Hydra refused and says so in the user's words."""
    parsed = [o for o in parse(overrides) if not str(o.key_or_group).startswith("hydra")]
    for override in parsed:
        group = override.key_or_group
        if group in GROUPS and not isinstance(override.value(), dict | list):
            known = options(group, extra)
            if str(override.value()) not in known:
                return UserError(
                    f"{group}={override.value()} is unknown: "
                    f"{did_you_mean(str(override.value()), known)}"
                )
    groups = [o.input_line or "" for o in parsed if o.key_or_group in GROUPS]
    try:
        base = plain(_hydra_compose(groups, name, extra))
    except (HydraException, OmegaConfBaseException, UserError):
        return UserError(f"the configuration cannot be composed: {_first_line(error)}")
    known_keys = flatten(base.values)
    for override in parsed:
        key = override.key_or_group
        is_node = any(k == key or k.startswith(f"{key}.") for k in known_keys)
        if key not in GROUPS and not override.is_add() and not is_node:
            return UserError(_unknown_key(key, base, extra))
    return UserError(f"the configuration cannot be composed: {_first_line(error)}")


def _unknown_key(key: str, base: Composed, extra: Sequence[Path]) -> str:
    group, _, rest = key.partition(".")
    if rest and group in GROUPS and group in base.choices:
        own = [k for k in flatten(base.values.get(group, {})) if not k.endswith("_target_")]
        message = f"{group}={base.choices[group]} has no key {rest!r}: "
        others = [
            f"{group}={option}"
            for option, path in options(group, extra).items()
            if rest in own_values(path)
        ]
        if others:
            return f"{message}it is a key of {', '.join(others)}"
        return message + (did_you_mean(rest, own) or "it has none, so leave it out")
    known = [*flatten(base.values), *GROUPS]
    return f"{key} is not a key of the configuration: {did_you_mean(key, known)}".rstrip(": ")
