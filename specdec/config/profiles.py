"""Loads latency profiles by name or path, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.clocks.profile import CostCurve
from specdec.config.options import options, read_yaml
from specdec.errors import UserError
from specdec.parts.fields import did_you_mean

_KINDS = ("stage", "draft", "middle", "head", "prune", "transfer", "exit")
_ORIGINS = ("stated", "measured", "assumed")
_CURVE = {"tokens", "ms", "block_tokens", "block_ms"}


def load_profile(
    name: str, extra: Sequence[Path] = (), *, key: str = "clock.profile"
) -> dict[str, Any]:
    """Loads and checks a latency profile: an option's name, or the path of a YAML of that form.

    Returns:
        "note": a text; "costs": {kind: {"tokens": [...], "ms": [...], ...}}; if the file has them,
        "degrees": {kind: {number of devices that share a layer: curve}}, "stages": the testbed's
        number of stages, "draft_name": the draft timed in "costs", and "drafts": {name: curve}.
    """
    known = options("profile", extra)
    path = known.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"{key}={name} is neither a profile nor a YAML file: {did_you_mean(name, known)}"
        )
    loaded = read_yaml(path, f"{key}={name} is not readable YAML", resolve=True)
    values: dict[Any, Any] = loaded if isinstance(loaded, dict) else {}
    costs = values.get("costs")
    if not isinstance(costs, dict) or not costs:
        raise UserError(f"{key}={name} needs a mapping `costs` of kind to cost curve")
    for kind, curve in costs.items():
        if kind not in _KINDS:
            raise UserError(
                f"{key}={name} prices {kind!r}, which is unknown: {did_you_mean(str(kind), _KINDS)}"
            )
        _check_curve(curve, f"{key}={name}: costs.{kind}")
    profile: dict[str, Any] = {"note": str(values.get("note", "")), "costs": costs}
    if "degrees" in values:
        _check_degrees(values["degrees"], f"{key}={name}: degrees")
        profile["degrees"] = values["degrees"]
    if "draft_name" in values:
        profile["draft_name"] = str(values["draft_name"])
    if "drafts" in values:
        _check_drafts(values["drafts"], f"{key}={name}: drafts")
        profile["drafts"] = values["drafts"]
    if "origins" in values:
        _check_origins(values["origins"], costs, f"{key}={name}: origins")
        origins = "; ".join(f"{kind} {origin}" for kind, origin in values["origins"].items())
        profile["note"] = f"{profile['note']} Figures: {origins}.".strip()
    if "stages" in values:
        if type(values["stages"]) is not int or values["stages"] < 1:
            raise UserError(
                f"{key}={name}: stages={values['stages']!r} must be a whole number of at least 1"
            )
        profile["stages"] = values["stages"]
    return profile


def _check_drafts(drafts: object, where: str) -> None:
    if not isinstance(drafts, dict) or not drafts:
        raise UserError(f"{where} needs a mapping of names of drafts to cost curves")
    for draft, curve in drafts.items():
        _check_curve(curve, f"{where}.{draft}")


def _check_origins(origins: object, costs: dict[str, Any], where: str) -> None:
    """Checks that every figure is labelled as stated, measured or assumed, with its source."""
    if not isinstance(origins, dict) or set(origins) != set(costs):
        raise UserError(f"{where} needs one text for each of {', '.join(costs)}")
    for kind, text in origins.items():
        if not str(text).startswith(_ORIGINS):
            raise UserError(f"{where}.{kind} must begin with one of {', '.join(_ORIGINS)}")


def _check_degrees(degrees: object, where: str) -> None:
    if not isinstance(degrees, dict) or not degrees.keys() <= {"stage", "draft"}:
        raise UserError(f"{where} needs a mapping of stage and draft to curves by devices")
    for kind, curves in degrees.items():
        if not (isinstance(curves, dict) and curves and all(isinstance(d, int) for d in curves)):
            raise UserError(f"{where}.{kind} needs a mapping of numbers of devices to curves")
        for degree, curve in curves.items():
            _check_curve(curve, f"{where}.{kind}.{degree}")
        if len({tuple(curve["tokens"]) for curve in curves.values()}) > 1:
            raise UserError(f"{where}.{kind}: all curves need the same `tokens`")


def _check_curve(curve: object, where: str) -> None:
    if not isinstance(curve, dict) or not {"tokens", "ms"} <= curve.keys() <= _CURVE:
        raise UserError(
            f"{where} needs lists `tokens` and `ms`, and may have block_tokens, block_ms"
        )
    try:
        CostCurve.of(curve)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
