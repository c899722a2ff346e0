"""Tests compute with PyTorch, whose tokens and tables are recorded, unless they name a backend."""

import os

os.environ.setdefault("SPECDEC_BACKEND", "eager")
