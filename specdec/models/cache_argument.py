"""The name of the argument by which transformers' models receive their cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names since and before transformers 5.24; outputs have an attribute of the same name."""


def cache_argument(model: nn.Module) -> str:
    """Returns the name for this model, whose ``forward`` must be a method of transformers."""
    return _of_forward(type(model).forward)


@cache
def _of_forward(forward: Callable[..., Any]) -> str:
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), CACHE_ARGUMENTS[-1])
