"""Composable speculative decoding: token sources, tree policies and executors in one loop.

Importing the package is cheap: torch and transformers are imported when a part that needs them is.
"""

from typing import TYPE_CHECKING

from specdec.errors import UserError
from specdec.lazy import lazy_exports

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
    from specdec.compose.workbench import build
    from specdec.planning.job import plan

__version__ = "0.1.0"

__all__ = [
    "Compared",
    "Decoder",
    "Generation",
    "Step",
    "UserError",
    "__version__",
    "build",
    "compare",
    "generate",
    "plan",
    "stream",
    "verify",
]
__getattr__, __dir__ = lazy_exports(__name__)
