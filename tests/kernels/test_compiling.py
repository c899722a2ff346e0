"""Triton compiles the kernels for a GPU, without needing one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path):
    """In a separate process, because this one may interpret the kernels."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("compiled") == 8
