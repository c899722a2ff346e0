"""Ways to start and to stop that need a word: torchrun, ports, one stage, Ctrl-C in training."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.distributed.torchrun import run_under_launcher
from specdec.errors import UserError
from specdec.runs.jobs import note_levels_on_one_stage


@pytest.mark.parametrize("command", ["run", "reproduce"])
def test_torchrun_of_a_command_that_starts_its_own_ranks(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every process did the whole work, and all but one met a locked folder."""
    for key, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    assert main([command, "model=random"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"started `specdec {command}` 4 times" in line
    assert "specdec worker CONFIG OUTPUT_DIR" in line
    monkeypatch.setenv("RANK", "3")
    assert main([command, "model=random"]) == 2
    assert capsys.readouterr().err == "", "one process tells"
    assert main(["worker"]) == 2
    assert "two arguments" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["run", "--help"]) == 0


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for key, value in there.items():
            monkeypatch.setenv(key, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(UserError, match=f"MASTER_PORT={port} is in use"):
            run_under_launcher(lambda: None, threads=1)
        monkeypatch.setenv("MASTER_PORT", "many")
        with pytest.raises(UserError, match=r"MASTER_PORT=many .* a free port"):
            run_under_launcher(lambda: None, threads=1)


def test_a_level_per_step_on_one_stage_gains_nothing() -> None:
    def runner(name: str, latency: int | None, levels: int | None) -> Any:
        executor, policy = SimpleNamespace(latency=latency), SimpleNamespace(levels_per_step=levels)
        return SimpleNamespace(name=name, parts=SimpleNamespace(executor=executor, policy=policy))

    notes: list[str] = []
    rows = [runner("specpipe", 1, 1), runner("pipeline", 4, 1), runner("serial", 1, None)]
    note_levels_on_one_stage([*rows, SimpleNamespace(name="hf", parts=None)], notes.append)  # type: ignore[list-item]
    (note,) = notes
    assert note.startswith("specpipe feeds one tree level per step")
    assert "executor.stages=2" in note
