"""Files that no program should write, full disks and memory, and signals: one line each.

What the command line answers to bad input is recorded in tests/matrix/recorded_commands.json.
"""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.cli.main import main


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_coldest_temperature_is_still_finite() -> None:
    import torch

    from specdec.sampling.transform import SamplingParams, SamplingTransform

    transform = SamplingTransform(SamplingParams(temperature=1e-6))
    logits = torch.tensor([[1e30, -1e30, 0.0], [3.0, 2.0, 3.0]])
    tokens, logprobs = transform.top(logits, 2)
    assert tokens[:, 0].tolist() == [0, 0]
    assert not np.isnan(logprobs).any()
    assert np.allclose(np.asarray(transform.probs(logits)), [[1, 0, 0], [0.5, 0, 0.5]])


@pytest.mark.slow
def test_a_folder_is_not_complete(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "model=random", "strategies=[ar]", "output_dir=c"]
    assert main(words) == 0
    capsys.readouterr()
    Path("c/comparison.json").write_text("null")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "comparison.json is damaged" in line
    Path("c/comparison.json").unlink()
    assert main(words) == 0
    assert len(engine.comparisons) == 2


@pytest.mark.slow
def test_a_job_of_a_sweep_fills_the_disk(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine.failing = {"speculative"}
    engine.error = OSError(errno.ENOSPC, "No space left on device")
    words = ["run", "-m", "model=random", "seed=1,2", "output_dir=s"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert "No space left on device" in told
    engine.failing = set()
    assert main(words) == 0


def test_torch_out_of_memory_is_one_line(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine.failing = {"speculative"}
    engine.error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 64 GB")
    assert main(["run", "model=random", "output_dir=out"]) == 1
    assert capsys.readouterr().err.startswith("specdec: memory is used up ([enforce fail] ")
    engine.error = RuntimeError("a defect of the library")
    with pytest.raises(RuntimeError, match="a defect"):
        main(["run", "model=random", "output_dir=out"])


def test_sigterm_ends_a_run_like_ctrl_c(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def run_job(config: Any, output_dir: Path, progress: Any) -> None:
        """Sends the signal twice, as ``timeout`` does."""
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before, run = signal.getsignal(signal.SIGTERM), engine.run_job
    engine.run_job = run_job
    words = ["run", "model=random", "output_dir=out"]
    assert main(words) == 143
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "specdec: ended by SIGTERM; start the same command again to continue"
    assert json.loads(Path("out/status.json").read_text())["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is before
    engine.run_job = run
    assert main(words) == 0
    assert json.loads(Path("out/status.json").read_text())["status"] == "ok"
