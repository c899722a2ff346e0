"""Latency profiles by name or path, as plain values (DESIGN 6)."""

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

_KINDS = ("stage", "draft", "head", "prune", "transfer")
_CURVE = {"tokens", "ms", "block_tokens", "block_ms"}


def load_profile(name: str, extra: Sequence[Path] = ()) -> dict[str, Any]:
    """The ``costs`` and ``note`` of a latency profile.

    Args:
        name: a profile of the tree, or the path of a YAML of the same form.
        extra: further configuration trees to look in.

    Returns:
        {"note": text, "costs": {kind: {"tokens": [...], "ms": [...], ...}}}.

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
    return {"note": str(loaded.get("note", "")), "costs": loaded["costs"]}


def _check_curve(name: str, kind: str, curve: object) -> None:
    if kind not in _KINDS:
        raise UserError(
            f"clock.profile={name} prices {kind!r}, which is unknown: {did_you_mean(kind, _KINDS)}"
        )
    where = f"clock.profile={name}: costs.{kind}"
    if not isinstance(curve, dict) or not {"tokens", "ms"} <= curve.keys() <= _CURVE:
        raise UserError(
            f"{where} needs lists `tokens` and `ms`, and may have block_tokens, block_ms"
        )
    tokens, ms = curve["tokens"], curve["ms"]
    if not (isinstance(tokens, list) and isinstance(ms, list) and len(tokens) == len(ms) > 0):
        raise UserError(f"{where}: `tokens` and `ms` must be lists of the same length")
    if any(a >= b for a, b in pairwise(tokens)) or min(ms) < 0:
        raise UserError(f"{where}: `tokens` must increase and `ms` must not be negative")
