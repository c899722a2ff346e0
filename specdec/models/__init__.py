"""Hugging Face models, whole or in slices of layers, run over this library's caches.

Names are imported on first use, so that ``inspect_model`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.models.inspection import ModelInfo, inspect_model
    from specdec.models.loading import load_model, load_stage, load_tokenizer
    from specdec.models.runner import NO_ROWS, ModelRunner, RunnerOutput

_HOMES = {
    "ModelInfo": "inspection",
    "inspect_model": "inspection",
    "load_model": "loading",
    "load_stage": "loading",
    "load_tokenizer": "loading",
    "NO_ROWS": "runner",
    "ModelRunner": "runner",
    "RunnerOutput": "runner",
}

__all__ = [
    "NO_ROWS",
    "ModelInfo",
    "ModelRunner",
    "RunnerOutput",
    "inspect_model",
    "load_model",
    "load_stage",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
