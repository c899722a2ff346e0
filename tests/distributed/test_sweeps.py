"""Sweeps in processes: killed and resumed, partly failing, with other launchers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.processes import PATIENCE_S, ROOT, Command, environment, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SMALL = (
    *("model=random", "model.num_layers=2", "model.hidden_size=32", "model.vocab_size=64"),
    *("threads=1", "strategy=speculative", "clock=simulated"),
)
BREAKING = """
from specdec.policies import Chain

class Breaking(Chain):
    def select(self, state, source):
        raise RuntimeError("planted")
"""
INTERPRETER = (sys.executable, "-m", "specdec.cli.main")
NUM_PROMPTS = 20


def command(folder: Path, *words: str) -> list[str]:
    return ["run", "-m", *SMALL, *words, f"output_dir={folder}"]


def finished(file: Path) -> bytes:
    """Complete lines of a file of finished prompts."""
    data = file.read_bytes() if file.is_file() else b""
    return data[: data.rfind(b"\n") + 1]


def records(folder: Path) -> dict[str, dict[str, object]]:
    found = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    return {record["job"]: record for record in found}


def test_a_killed_sweep_goes_on_and_failures_stop_nothing(tmp_path: Path) -> None:
    """Two axes, one value fails; killed in the second job; resumed with parallel jobs."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "breaking.py").write_text(BREAKING, encoding="utf-8")
    (tmp_path / "tree" / "policy").mkdir(parents=True)
    (tmp_path / "tree" / "policy" / "breaking.yaml").write_text(
        "_target_: breaking.Breaking\ngamma: 3\n", encoding="utf-8"
    )
    folder = tmp_path / "sweep"
    axes = ("policy=chain,breaking", "seed=0,1", f"data.limit={NUM_PROMPTS}", "max_new_tokens=8")
    words = command(folder, "--config-dir", str(tmp_path / "tree"), *axes)
    jobs = [f"policy={p},seed={s}" for p in ("chain", "breaking") for s in (0, 1)]
    first, second = folder / jobs[0], folder / jobs[1] / "requests.jsonl"
    killed = Command(*words, log=tmp_path / "killed.err", folders=[tmp_path])
    try:
        wait_until(
            lambda: finished(second).count(b"\n") >= 2 or killed.status is not None,
            "two prompts of the second job",
        )
        assert killed.status is None, "the sweep was over before it could be killed"
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait(60.0)
    done = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in first.glob("*.json*")}
    begun = finished(second)
    assert "summary.json" in done
    assert begun.count(b"\n") < NUM_PROMPTS, "killed in the middle"

    # Workers of joblib end with their interpreter, so this one is fresh.
    env = environment()
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    resumed = subprocess.run(
        [*INTERPRETER, *words, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    assert resumed.returncode == 1, resumed.stderr
    assert done == {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in first.glob("*.json*")}
    assert finished(second).startswith(begun), "finished prompts are not decoded again"
    assert finished(second).count(b"\n") == NUM_PROMPTS
    found = records(folder)
    assert [found[job]["status"] for job in jobs] == ["skipped", "ok", "failed", "failed"]
    last = resumed.stderr.splitlines()[-2:]
    assert last == [f"  {job}: RuntimeError: planted" for job in jobs[2:]]
    assert "1 run, 1 complete before, 2 failed" in resumed.stdout
    assert not list(folder.glob(".jobs-*")), "what jobs tell is gathered in sweep.json"
    status = json.loads((folder / jobs[2] / "status.json").read_text(encoding="utf-8"))
    assert 'raise RuntimeError("planted")' in status["traceback"]
    assert "in select of policy=breaking (class breaking.Breaking)" in status["traceback"]


@pytest.mark.exhaustive
def test_a_sweep_as_submitted_jobs(tmp_path: Path) -> None:
    """submitit's local executor uses the same code path as its Slurm executor."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    folder = tmp_path / "sweep"
    words = command(folder, "seed=0,1", "data.limit=2", "max_new_tokens=4")
    ended = subprocess.run(
        [*INTERPRETER, *words, "hydra/launcher=submitit_local"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert {job: r["status"] for job, r in records(folder).items()} == {
        "seed=0": "ok",
        "seed=1": "ok",
    }
    assert "do not count" not in ended.stderr, "simulated times count wherever a job runs"
