"""Ranks that something else starts: two torchrun agents on loopback stand for two machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from tests.distributed.processes import ROOT, environment

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
    """A port for the agents to meet at (a cluster gives one; here it must be found)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outputs(folder: Path) -> dict[int, Any]:
    lines = (folder / "requests.jsonl").read_text().splitlines()
    return {record["id"]: record["output"] for record in map(json.loads, lines)}


def agents(job: Path, folder: Path, ranks_per_node: int) -> list[subprocess.Popen[str]]:
    """Two torchrun agents with two ranks each."""
    port = free_port()
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *(f"--node-rank={node}", f"--nproc-per-node={ranks_per_node}"),
                *("--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0"),
                *("-m", "specdec.cli.main", "worker", str(job), str(folder)),
            ],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for node in range(2)
    ]


def test_two_nodes_give_what_one_process_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--cfg", *JOB, "executor.transport=distributed"]) == 0
    job = tmp_path / "job.yaml"
    job.write_text(capsys.readouterr().out)
    nodes = agents(job, tmp_path / "nodes", 2)
    try:
        said = [node.communicate(timeout=400)[0] for node in nodes]
    finally:
        for node in nodes:
            with suppress(OSError):
                os.killpg(node.pid, 9)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert main(["run", *JOB, f"output_dir={tmp_path / 'one'}"]) == 0
    found = outputs(tmp_path / "nodes")
    assert len(found) == 3
    assert found == outputs(tmp_path / "one")
    assert (tmp_path / "nodes" / "summary.json").is_file()


@pytest.mark.parametrize("words", [["worker"], ["worker", "no-such.yaml", "out"]])
def test_bad_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "specdec" in capsys.readouterr().err


def test_without_a_launcher_the_remedy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["run", "--cfg", *JOB, "executor.transport=distributed"]) == 0
    job = tmp_path / "job.yaml"
    job.write_text(capsys.readouterr().out)
    assert main(["worker", str(job), str(tmp_path / "out")]) == 2
    assert "torchrun" in capsys.readouterr().err
    assert main(["run", "--cfg", *JOB]) == 0
    job.write_text(capsys.readouterr().out)
    assert main(["worker", str(job), str(tmp_path / "out")]) == 2
    assert "executor.transport=in_process" in capsys.readouterr().err
