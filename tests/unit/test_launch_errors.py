"""Ways to start and to stop that need a word: torchrun, ports, one stage, Ctrl-C in training."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.distributed.torchrun import run_under_launcher
from specdec.errors import UserError
from specdec.runs.conditions import note_levels_on_one_stage


@pytest.mark.parametrize("command", ["run", "compare", "verify", "profile", "reproduce"])
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


def test_srun_of_a_command_that_starts_its_own_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert main(["compare", "model=random"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "srun has started `specdec compare` 8 times" in line
    assert "give srun the command `specdec worker CONFIG OUTPUT_DIR`" in line
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert main(["compare", "model=random"]) == 2
    assert capsys.readouterr().err == "", "one process tells"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert main(["compare", "--help"]) == 0


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


def test_ctrl_c_during_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(what: str, _config: dict[str, Any]) -> int:
        assert what == "tokenizer"
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    monkeypatch.setattr("specdec.train.cli.run", run)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["train", "tokenizer"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "specdec: interrupted; start the same command again to continue"


def test_a_message_keeps_its_remedy_whatever_the_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_words: list[str]) -> int:
        raise UserError(f"model.target={'a' * 9000} does not exist: give a folder")

    monkeypatch.setattr("specdec.cli.list.main", refuse)
    assert main(["list"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 1100
    assert line.startswith("specdec: model.target=aaa")
    assert line.endswith("does not exist: give a folder")
