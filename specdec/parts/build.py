"""Constructs parts from configuration nodes ``{"_target_": "package.Class", key: value, ...}``."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import UserError


def build_part(
    node: Mapping[str, Any], runtime: Mapping[str, Callable[[], Any]], where: str
) -> Any:
    """Builds one part from its configuration node; nested nodes are built first.

    Raises:
        UserError: for a class that cannot be imported, an unknown key or a refused value.
    """
    cls = locate(node["_target_"], where)
    parameters = inspect.signature(cls).parameters
    kwargs: dict[str, Any] = {}
    for key, value in node.items():
        if key == "_target_":
            continue
        if key not in parameters:
            close = difflib.get_close_matches(key, parameters, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(parameters)}"
            raise UserError(f"{where}.{key}: {cls.__name__} has no such key{hint}")
        kwargs[key] = _built(value, runtime, f"{where}.{key}")
    for name in parameters:
        if name not in kwargs and name in runtime:
            kwargs[name] = runtime[name]()
    try:
        return cls(**kwargs)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} ({cls.__name__}): {error}") from error


def locate(path: str, where: str) -> type:
    """Imports the class that a ``_target_`` names.

    Raises:
        UserError: if there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{where}._target_={path}: {error}; give an importable class as package.module.Class"
        ) from error


def _built(value: Any, runtime: Mapping[str, Callable[[], Any]], where: str) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return build_part(value, runtime, where)
    if isinstance(value, list) and any(isinstance(v, Mapping) and "_target_" in v for v in value):
        return [_built(v, runtime, f"{where}[{i}]") for i, v in enumerate(value)]
    return value
