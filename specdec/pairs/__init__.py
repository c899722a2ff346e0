"""Pairs of a target and its draft: pretrained, random, loaded, tables, synthetic or recorded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.executors.models import ModelPair
    from specdec.pairs.build import build_pair
    from specdec.pairs.huggingface import HuggingFacePair
    from specdec.pairs.loaded import LoadedPair
    from specdec.pairs.options import ModelOptions
    from specdec.pairs.pretrained import PretrainedPair
    from specdec.pairs.random import RandomPair
    from specdec.pairs.table import TablePair

__all__ = [
    "HuggingFacePair",
    "LoadedPair",
    "ModelOptions",
    "ModelPair",
    "PretrainedPair",
    "RandomPair",
    "TablePair",
    "build_pair",
]

_MODULES = {
    "HuggingFacePair": "specdec.pairs.huggingface",
    "LoadedPair": "specdec.pairs.loaded",
    "ModelOptions": "specdec.pairs.options",
    "ModelPair": "specdec.executors.models",
    "PretrainedPair": "specdec.pairs.pretrained",
    "RandomPair": "specdec.pairs.random",
    "TablePair": "specdec.pairs.table",
    "build_pair": "specdec.pairs.build",
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: a table of logits needs no transformers."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
