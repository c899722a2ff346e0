"""The library works without Triton, flash-attn and torchao, even if they are installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.distributed  # a process of its own
def test_everything_is_imported_and_a_pass_runs():
    """In a separate process in which these packages cannot be imported."""
    words = [sys.executable, "-m", "tests.kernels.blocked"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules, tokens = done.stdout.split(";")
    assert int(modules.split()[0]) > 150
    assert tokens.split() == ["4", "tokens"]
