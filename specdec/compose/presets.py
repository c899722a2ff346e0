"""Builds the presets of ``conf/strategy`` in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.compose.workbench import Parts, Workbench, build_parts
from specdec.config.hydra import compose_config
from specdec.config.job import check_config
from specdec.errors import UserError
from specdec.interfaces import Verifier
from specdec.pairs.options import build_pair
from specdec.parts.fields import did_you_mean

_SECTIONS = ("source", "policy", "verifier", "executor", "serving")


def build(
    preset: str, bench: Workbench | None = None, *, verifier: Verifier | None = None, **keys: Any
) -> Parts:
    """Builds the strategy that ``strategy=NAME`` runs on the command line.

        parts = specdec.build("specpipe", width=4, stages=4)
        parts = specdec.build("speculative", Workbench(pair), verifier=RejectionVerifier())

    Args:
        preset: its name (``specdec list strategies``).
        bench: models, clock and seed. Default: those of the configuration, which are the bundled
            pair and the wall clock.
        verifier: replaces the preset's.
        keys: values of the preset's keys, named shortly (``width`` for ``policy.width``) or in full
            (``**{"policy.width": 4}``). The name of a group chooses one of its options
            (``executor="pipeline"``). None leaves the preset's value. ``stages`` moves a preset of
            one device to a pipeline.

    Raises:
        UserError: an unknown preset, key or option, a bad value, or parts that do not fit together.
    """
    words = [f"strategy={preset}"]
    config = compose_config(words).values
    changed = {key: value for key, value in keys.items() if value is not None}
    if "stages" in changed and "stages" not in config["executor"]:
        changed = {"executor": "pipeline", **changed, "executor.stages": changed["stages"]}
        del changed["stages"]
    words += [f"{_whole_name(key, config)}={_text(value)}" for key, value in changed.items()]
    composed = compose_config(words)
    config = composed.values
    check_config(config, composed.choices)
    if bench is None:
        bench = Workbench(build_pair(config["model"]), seed=int(config["seed"]))
    return build_parts(config, bench, verifier=verifier)


def _whole_name(key: str, config: Mapping[str, Any]) -> str:
    """Completes the name of a key by its section: ``width`` -> ``policy.width``."""
    if "." in key or key in _SECTIONS:
        return key
    sections = {name: config.get(name) or {} for name in _SECTIONS}
    found = [name for name, section in sections.items() if key in section]
    if len(found) == 1:
        return f"{found[0]}.{key}"
    if found:
        names = " or ".join(f"{section}.{key}" for section in found)
        raise UserError(f"{key} is a key of several parts: give {names} by its whole name")
    known = {name for section in sections.values() for name in section if name != "_target_"}
    raise UserError(f"the preset's parts have no key {key!r}: {did_you_mean(key, known)}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
