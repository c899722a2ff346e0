from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from specdec.errors import UserError
from specdec.executors.models import ModelPair
from specdec.parts.build import build_part

_BUILDERS = {
    "pretrained": "specdec.pairs.pretrained.build_pretrained",
    "random": "specdec.pairs.random.build_random",
    "synthetic": "specdec.pairs.recorded.build_synthetic",
    "replay": "specdec.pairs.replay.build_replay",
    "table": "specdec.pairs.table.TablePair",
}
"""``model.kind`` -> function or class that takes the other keys; only that one is imported."""


def build_pair(cfg: Mapping[str, Any]) -> ModelPair:
    """Builds the pair of the section ``model``: a built-in kind, or the class in ``_target_``."""
    keys = {k: v for k, v in cfg.items() if k != "kind"}
    if "_target_" in cfg:
        return build_part(keys, {}, "model", ModelPair)  # type: ignore[no-any-return]
    if cfg["kind"] not in _BUILDERS:
        raise UserError(f"model.kind={cfg['kind']} is unknown; use {', '.join(_BUILDERS)}")
    try:
        return resolve_name(_BUILDERS[cfg["kind"]])(**keys)  # type: ignore[no-any-return]
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {error}") from error
