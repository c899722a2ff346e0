"""Run folders, resumption and sweeps of the command line, with a fake engine behind it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.config.folders import alone_in, safe_name

RANDOM = "model=random"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def status_of(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text(encoding="utf-8"))["status"]


class TestRun:
    def test_engine_gets_plain_values_and_the_folder_keeps_them(self, engine) -> None:
        assert main(["run", RANDOM, "strategy=best_first", "policy.bs=16", "output_dir=out"]) == 0
        [(config, folder)] = engine.runs
        assert folder == Path("out")
        assert config == json.loads(json.dumps(config)), "only plain values cross the door"
        assert config["policy"]["bs"] == 16
        from omegaconf import OmegaConf

        assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == config
        assert status_of(folder) == "ok"

    def test_a_complete_folder_is_not_run_again(self, engine, capsys) -> None:
        for _ in range(2):
            assert main(["run", RANDOM, "output_dir=out"]) == 0
        assert len(engine.runs) == 1
        assert "complete already" in capsys.readouterr().out

    def test_two_processes_do_not_share_a_folder(self, engine, capsys) -> None:
        """Both took the folder for an interrupted run, and wrote every prompt's line twice."""
        Path("out").mkdir()
        with alone_in(Path("out")):
            assert main(["run", RANDOM, "output_dir=out"]) == 2
            assert main(["run", "-m", RANDOM, "seed=0,1", "output_dir=out"]) == 2
        assert capsys.readouterr().err.count("another process uses it") == 2
        assert engine.runs == []
        assert main(["run", RANDOM, "output_dir=out"]) == 0, "a lock ends with its owner"

    def test_another_configuration_may_not_use_the_folder(self, engine, capsys) -> None:
        assert main(["run", RANDOM, "output_dir=out"]) == 0
        assert main(["run", RANDOM, "output_dir=out", "seed=1"]) == 2
        assert "seed is 0 there and 1 here" in capsys.readouterr().err
        assert len(engine.runs) == 1

    def test_somebody_elses_folder_is_left_alone(self, engine, capsys) -> None:
        Path("thesis").mkdir()
        Path("thesis/chapter.txt").write_text("mine", encoding="utf-8")
        assert main(["run", RANDOM, "output_dir=thesis"]) == 2
        assert "not empty" in capsys.readouterr().err
        assert [p.name for p in Path("thesis").iterdir()] == ["chapter.txt"]
        Path("file").touch()
        assert main(["run", RANDOM, "output_dir=file"]) == 2


class TestSweep:
    SWEEP = ("run", "-m", RANDOM, "strategy=ar,best_first", "seed=0,13", "output_dir=sweep")

    @pytest.mark.slow
    def test_it_resumes_and_goes_on_after_failures(self, engine, capsys) -> None:
        engine.failing = {"ar"}
        assert main(list(self.SWEEP)) == 1
        assert [folder.name for _, folder in engine.runs] == [
            f"strategy={s},seed={n}" for s in ("ar", "best_first") for n in (0, 13)
        ], "a failed job must not end the sweep"
        assert not list(Path("sweep").rglob(".hydra")), "config.yaml is the run's only record"
        assert "2 run, 0 complete before, 2 failed" in capsys.readouterr().out
        assert status_of(Path("sweep/strategy=ar,seed=0")) == "failed"
        engine.failing = set()
        assert main(list(self.SWEEP)) == 0
        assert len(engine.runs) == 6, "what was complete is skipped"
        assert "2 run, 2 complete before, 0 failed" in capsys.readouterr().out

    @pytest.mark.slow
    def test_what_ctrl_c_left_undone_is_called_so(self, engine) -> None:
        engine.failing, engine.error = {"best_first"}, KeyboardInterrupt()
        words = ["run", "-m", RANDOM, "strategy=ar,best_first,staged", "output_dir=sweep"]
        assert main(words) == 130
        records = json.loads(Path("sweep/sweep.json").read_text(encoding="utf-8"))
        assert [r["status"] for r in records] == ["ok", "interrupted", "interrupted"]


class TestCompare:
    WORDS = ("compare", RANDOM, "strategies=[ar,staged]", "repeats=3", "output_dir=out")

    def test_engine_gets_one_configuration_per_row(self, engine) -> None:
        assert main(list(self.WORDS)) == 0
        [(configs, folder, repeats)] = engine.comparisons
        assert [c["strategy"]["name"] for c in configs] == ["ar", "staged"]
        assert (folder, repeats) == (Path("out"), 3)
        assert all("repeats" not in c and "strategies" not in c for c in configs)

    def test_repeated_it_shows_the_table_it_has(self, engine, capsys) -> None:
        for _ in range(2):
            assert main(list(self.WORDS)) == 0
        assert len(engine.comparisons) == 1
        assert "| the table |" in capsys.readouterr().out

    @pytest.mark.slow
    def test_other_rows_may_not_use_the_folder(self, engine, capsys) -> None:
        assert main(list(self.WORDS)) == 0
        assert main(["run", RANDOM, "output_dir=out"]) == 2
        assert "results of `specdec compare`, and this is" in capsys.readouterr().err
        assert main([*self.WORDS[:2], "strategies=[ar,staged,mixture]", *self.WORDS[3:]]) == 2


def test_names_of_folders_are_safe_and_differ() -> None:
    assert safe_name("strategy=ar,seed=1") == "strategy=ar,seed=1"
    assert safe_name("a/b") != safe_name("a-b")
    assert "/" not in safe_name("model.target=org/name")
    assert safe_name("../..") not in ("..", ".", "")
    assert len(safe_name("x" * 500)) < 200


@pytest.mark.slow
def test_a_fresh_process_refuses_in_one_line(tmp_path: Path) -> None:
    """As a user starts it: libraries that are imported on the way must print nothing either."""
    done = subprocess.run(
        [sys.executable, "-m", "specdec.cli.main", "run", "policy.gamma=0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("specdec: policy.gamma=0 cannot be used: ")
    assert "policy=root_only" in line


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=prompt_lookup", "source.min_match=20"],
        ["strategy=suffix", "verifier=rejection", "sampling=t08"],
        ["strategy=suffix", "source.path=nowhere"],
    ],
)
def test_sources_without_models_are_refused_before_models_are_loaded(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "model=tiny", *words, f"output_dir={tmp_path / 'run'}"]) == 2
    assert "loading" not in capsys.readouterr().err
