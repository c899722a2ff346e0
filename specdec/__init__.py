"""Composable speculative decoding: token sources, tree policies and executors in one loop.

Importing the package is cheap: torch and transformers are imported when a part that needs them is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.errors import UserError

if TYPE_CHECKING:
    from specdec.api import (
        Compared,
        Decoder,
        Generation,
        Step,
        compare,
        generate,
        stream,
        verify,
    )
    from specdec.planning import plan

__version__ = "0.1.0"

__all__ = [
    "Compared",
    "Decoder",
    "Generation",
    "Step",
    "UserError",
    "__version__",
    "compare",
    "generate",
    "plan",
    "stream",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module("specdec.planning" if name == "plan" else "specdec.api"), name)


def __dir__() -> list[str]:
    return __all__
