"""Composable speculative decoding: token sources, tree policies and executors in one loop.

Importing the package is cheap: torch and transformers are imported when a part that needs them is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.errors import UserError

if TYPE_CHECKING:
    from specdec.api import Decoder, generate, stream, verify
    from specdec.comparing import Compared, compare
    from specdec.generation import Generation, Step
    from specdec.planning import plan

__version__ = "0.1.0"

_FROM_API = ("Decoder", "Generation", "Step", "generate", "stream", "verify")
_FROM_COMPARING = ("Compared", "compare")

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
    if name in _FROM_API:
        from specdec import api

        return getattr(api, name)
    if name == "plan":
        from specdec.planning import plan

        return plan
    if name in _FROM_COMPARING:
        from specdec import comparing

        return getattr(comparing, name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
