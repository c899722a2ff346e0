"""Ranks started by launchers, on loopback: two torchrun agents, and Slurm's environment."""

import json
import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from tests.distributed.processes import module

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = [
    "strategy=specpipe",
    "policy.width=6",
    "policy.children=3",
    "executor.stages=3",
    "model=random",
    "model.num_layers=4",
    "model.hidden_size=32",
    "model.vocab_size=64",
    "sampling=t08",
    "data=stdlib",
    "data.limit=3",
    "max_new_tokens=12",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outputs(folder: Path) -> dict[int, Any]:
    lines = (folder / "requests.jsonl").read_text().splitlines()
    return {record["id"]: record["output"] for record in map(json.loads, lines)}


def worker(job: Path, folder: Path) -> tuple[str, ...]:
    return ("specdec.cli.main", "worker", str(job), str(folder))


def write_job(job: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> None:
    """Writes a resolved configuration with ``specdec run --cfg``."""
    assert main(["run", "--cfg", *JOB, *overrides]) == 0
    job.write_text(capsys.readouterr().out)


def check(processes: list[subprocess.Popen[str]], folder: Path, expected: Path) -> None:
    """All processes succeed, and the results equal those of one process."""
    try:
        said = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            with suppress(OSError):
                os.killpg(process.pid, 9)
    assert [process.returncode for process in processes] == [0] * len(processes), said
    assert main(["run", *JOB, f"output_dir={expected}"]) == 0
    found = outputs(folder)
    assert len(found) == 3
    assert found == outputs(expected)
    assert (folder / "summary.json").is_file()


def test_two_nodes_give_what_one_process_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two torchrun agents, with one rank and with two."""
    job, folder, port = tmp_path / "job.yaml", tmp_path / "nodes", free_port()
    write_job(job, capsys, "executor.transport=distributed", "executor.stages=2")
    nodes = [
        module(
            *(
                "torch.distributed.run",
                "--nnodes=2",
                f"--node-rank={node}",
                f"--nproc-per-node={node + 1}",
            ),
            *("--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0", "-m"),
            *worker(job, folder),
        )
        for node in range(2)
    ]
    check(nodes, folder, tmp_path / "one")


@pytest.mark.exhaustive
def test_tasks_of_slurm_give_what_one_process_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment that srun sets, with fewer stages and the same tokens."""
    job, folder, port = tmp_path / "job.yaml", tmp_path / "tasks", free_port()
    write_job(job, capsys, "executor.transport=distributed", "executor.stages=2")
    tasks = [
        module(
            *worker(job, folder),
            **{"SLURM_PROCID": str(task), "SLURM_NTASKS": "3", "SLURM_LOCALID": str(task)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for task in range(3)
    ]
    check(tasks, folder, tmp_path / "one")


def test_without_a_launcher_the_remedy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    job = tmp_path / "job.yaml"
    write_job(job, capsys, "executor.transport=distributed")
    assert main(["worker", str(job), str(tmp_path / "out")]) == 2
    assert "torchrun" in capsys.readouterr().err
    write_job(job, capsys)
    assert main(["worker", str(job), str(tmp_path / "out")]) == 2
    assert "executor.transport=in_process" in capsys.readouterr().err
