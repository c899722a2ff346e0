"""Runs over several hosts: torchrun on each, and the tokens of one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from tests.distributed.processes import wait_until
from tests.hosts.machines import Host, torchrun, wait_all

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

LIMIT_S = 200.0
MODEL = [
    "model=random",
    "model.num_layers=4",
    "model.hidden_size=32",
    "model.vocab_size=64",
    "model.dtype=float64",
    "data=stdlib",
    "data.limit=3",
    "max_new_tokens=16",
    "threads=1",
]
TREE = ("policy.width=6", "policy.children=3")
JOBS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "specpipe": (
        (2, 1, 1, 1),
        ("strategy=specpipe", *TREE, "executor.stages=4", "sampling=t08"),
    ),
    "ppsd": (
        (2, 1, 1, 1),
        ("strategy=ppsd", "executor=pipeline", "executor.stages=4", "model.exit_layer=1"),
    ),
    "swiftspec_2+2": (
        (1, 1, 1, 1),
        (
            *("strategy=swiftspec", "executor.stages=1"),
            *("executor.target_degree=2", "executor.draft_degree=2"),
        ),
    ),
    "pearl": ((1, 1), ("strategy=pearl", "executor=pipeline", "executor.stages=1")),
}


def write_job(job: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """Writes a resolved configuration with ``specdec run --cfg``."""
    assert main(["run", "--cfg", *words, "executor.transport=distributed"]) == 0
    job.write_text(capsys.readouterr().out)


def outputs(folder: Path) -> dict[int, Any]:
    """Finished prompts on disk, from complete lines."""
    file = folder / "requests.jsonl"
    text = file.read_text() if file.is_file() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {record["id"]: record["output"] for record in map(json.loads, lines)}


def logs(folder: Path) -> str:
    return "\n".join(f"{f.name}: {f.read_text()[-3000:]}" for f in sorted(folder.glob("*.log")))


def nothing_runs(built: list[Host]) -> None:
    wait_until(lambda: not any(host.pids() for host in built), "processes left on hosts", 20.0)


@pytest.mark.parametrize("name", JOBS)
def test_hosts_give_the_tokens_of_one_process(
    name: str,
    build: Callable[[int], list[Host]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks, words = JOBS[name]
    job, folder = tmp_path / "job.yaml", tmp_path / "hosts"
    write_job(job, capsys, *MODEL, *words)
    built = build(len(ranks))
    statuses = wait_all(torchrun(built, job, folder, ranks=ranks), LIMIT_S)
    assert statuses == [0] * len(ranks), logs(tmp_path)
    nothing_runs(built)
    assert main(["run", *MODEL, *words, f"output_dir={tmp_path / 'one'}"]) == 0
    assert len(outputs(folder)) == 3
    assert outputs(folder) == outputs(tmp_path / "one")
    assert (folder / "summary.json").is_file()


def test_replicas_are_refused_on_every_host(
    build: Callable[[int], list[Host]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies of the target are processes of one host so far: one line says so, and all end."""
    job, folder = tmp_path / "job.yaml", tmp_path / "hosts"
    write_job(job, capsys, *MODEL, "strategy=dsi", "executor.replicas=2")
    built = build(2)
    statuses = wait_all(torchrun(built, job, folder, ranks=(2, 1)), LIMIT_S)
    assert None not in statuses
    assert statuses[0] != 0
    assert "run it without torchrun or Slurm" in (tmp_path / "host0.log").read_text()
    nothing_runs(built)
