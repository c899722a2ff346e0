"""Reads a configuration of transformers, whose keys depend on the family of the model."""

from typing import Any


def config_value(config: Any, name: str, default: Any = None) -> Any:
    return getattr(config, name, None) or default
