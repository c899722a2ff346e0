"""Reads a transformers configuration, whose keys depend on the family of the model."""

from typing import Any

from transformers import PreTrainedConfig


def config_value(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    return getattr(config, name, None) or default
