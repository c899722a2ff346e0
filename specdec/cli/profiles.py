"""Latency profiles by name or path, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specdec.cli.suggest import did_you_mean
from specdec.cli.tree import options
from specdec.errors import UserError

_KINDS = ("stage", "draft", "head", "prune", "transfer", "exit")
_CURVE = {"tokens", "ms", "block_tokens", "block_ms"}


def load_profile(name: str, extra: Sequence[Path] = ()) -> dict[str, Any]:
    """The ``costs``, ``note`` and, where it has them, ``degrees`` of a latency profile.

    Args:
        name: a profile of the tree, or the path of a YAML of the same form.
        extra: further configuration trees to look in.

    Returns:
        {"note": text, "costs": {kind: {"tokens": [...], "ms": [...], ...}}}, and "degrees": {kind:
        {devices that share a layer: curve}}.

    Raises:
        UserError: there is none of that name, or it is not of that form.
    """
    known = options("profile", extra)
    path = known.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"clock.profile={name} is neither a profile nor a YAML file:"
            f" {did_you_mean(name, known)}"
        )
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"clock.profile={name} is no readable YAML: {reason}") from error
    if not isinstance(loaded, dict) or not isinstance(loaded.get("costs"), dict):
        raise UserError(f"clock.profile={name} needs a mapping `costs` of kind to cost curve")
    for kind, curve in loaded["costs"].items():
        _check_curve(name, str(kind), curve)
    found = {"note": str(loaded.get("note", "")), "costs": loaded["costs"]}
    if "degrees" in loaded:
        _check_degrees(name, loaded["degrees"])
        found["degrees"] = loaded["degrees"]
    return found


def _check_degrees(name: str, degrees: object) -> None:
    where = f"clock.profile={name}: degrees"
    if not isinstance(degrees, dict) or not degrees.keys() <= {"stage", "draft"}:
        raise UserError(f"{where} needs a mapping of stage and draft to curves by devices")
    for kind, curves in degrees.items():
        if not (isinstance(curves, dict) and curves and all(isinstance(d, int) for d in curves)):
            raise UserError(f"{where}.{kind} needs a mapping of numbers of devices to curves")
        for degree, curve in curves.items():
            _check_curve(name, kind, curve, f"{where}.{kind}.{degree}")
        if len({tuple(curve["tokens"]) for curve in curves.values()}) > 1:
            raise UserError(f"{where}.{kind}: all curves need the same `tokens`")


def _check_curve(name: str, kind: str, curve: object, where: str = "") -> None:
    if kind not in _KINDS:
        raise UserError(
            f"clock.profile={name} prices {kind!r}, which is unknown: {did_you_mean(kind, _KINDS)}"
        )
    where = where or f"clock.profile={name}: costs.{kind}"
    if not isinstance(curve, dict) or not {"tokens", "ms"} <= curve.keys() <= _CURVE:
        raise UserError(
            f"{where} needs lists `tokens` and `ms`, and may have block_tokens, block_ms"
        )
    tokens, ms = curve["tokens"], curve["ms"]
    if not (isinstance(tokens, list) and isinstance(ms, list) and len(tokens) == len(ms) > 0):
        raise UserError(f"{where}: `tokens` and `ms` must be lists of the same length")
    if any(a >= b for a, b in pairwise(tokens)) or min(ms) < 0:
        raise UserError(f"{where}: `tokens` must increase and `ms` must not be negative")
