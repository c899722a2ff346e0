"""Pairs of a target and its draft: pretrained, random, synthetic, from tables or replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import UserError
from specdec.executors.models import ModelPair
from specdec.pairs.huggingface import HuggingFacePair
from specdec.pairs.loaded import LoadedPair
from specdec.pairs.options import Dtype, ModelOptions, with_flat_options
from specdec.pairs.pretrained import PretrainedPair
from specdec.pairs.random import RandomPair
from specdec.pairs.record import Record, read_record, read_traces, write_record
from specdec.pairs.recorded import RecordedPair, build_synthetic
from specdec.pairs.recorder import check_recordable, record_request, record_run
from specdec.pairs.replay import ReplayModels, build_replay
from specdec.pairs.table import TablePair
from specdec.parts.build import build_part

__all__ = [
    "HuggingFacePair",
    "LoadedPair",
    "ModelOptions",
    "ModelPair",
    "PretrainedPair",
    "RandomPair",
    "Record",
    "RecordedPair",
    "ReplayModels",
    "TablePair",
    "build_pair",
    "check_recordable",
    "read_record",
    "read_traces",
    "record_request",
    "record_run",
    "write_record",
]


build_pretrained = with_flat_options(PretrainedPair)
build_random = with_flat_options(RandomPair, dtype=Dtype)


def build_pair(cfg: Mapping[str, Any]) -> ModelPair:
    """The pair that ``model=`` describes: a built-in kind, or the class in ``_target_``.

    Raises:
        UserError: for an unknown kind or key, or unusable paths.
    """
    keys = {k: v for k, v in cfg.items() if k != "kind"}
    if "_target_" in cfg:
        return build_part(keys, {}, "model", ModelPair)  # type: ignore[no-any-return]
    builders: dict[str, Any] = {
        "pretrained": build_pretrained,
        "random": build_random,
        "synthetic": build_synthetic,
        "replay": build_replay,
        "table": TablePair,
    }
    if cfg["kind"] not in builders:
        raise UserError(f"model.kind={cfg['kind']} is unknown; use {', '.join(builders)}")
    try:
        return builders[cfg["kind"]](**keys)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"model: {error}") from error
