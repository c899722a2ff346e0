"""Builds the pair that the section ``model`` of a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import UserError
from specdec.executors.models import ModelPair
from specdec.pairs.options import Dtype, with_flat_options
from specdec.pairs.pretrained import PretrainedPair
from specdec.pairs.random import RandomPair
from specdec.pairs.recorded import build_synthetic
from specdec.pairs.replay import build_replay
from specdec.pairs.table import TablePair
from specdec.parts.build import build_part

build_pretrained = with_flat_options(PretrainedPair)
build_random = with_flat_options(RandomPair, dtype=Dtype)

KINDS: Mapping[str, Callable[..., Any]] = {
    "pretrained": build_pretrained,
    "random": build_random,
    "synthetic": build_synthetic,
    "replay": build_replay,
    "table": TablePair,
}
"""``model.kind`` -> what takes the other keys."""


def build_pair(cfg: Mapping[str, Any]) -> ModelPair:
    """The pair that ``model=`` describes: a built-in kind, or the class in ``_target_``.

    Raises:
        UserError: for an unknown kind or key, or unusable paths.
    """
    keys = {k: v for k, v in cfg.items() if k != "kind"}
    if "_target_" in cfg:
        return build_part(keys, {}, "model", ModelPair)  # type: ignore[no-any-return]
    if cfg["kind"] not in KINDS:
        raise UserError(f"model.kind={cfg['kind']} is unknown; use {', '.join(KINDS)}")
    try:
        return KINDS[cfg["kind"]](**keys)  # type: ignore[no-any-return]
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {error}") from error
