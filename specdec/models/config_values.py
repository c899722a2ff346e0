"""Reads a transformers configuration, whose keys depend on the family of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def config_value(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    return getattr(config, name, None) or default
