"""Composable speculative decoding: token sources, tree policies and executors in one loop.

Importing the package is cheap: torch and transformers are imported when a part that needs them is.
"""

from __future__ import annotations

from specdec.errors import UserError

__version__ = "0.1.0"

__all__ = ["UserError", "__version__"]
