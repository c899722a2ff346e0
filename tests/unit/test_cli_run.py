"""Run folders, resumption and sweeps of the command line, with a fake engine behind it."""

from __future__ import annotations

import errno
import json
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import ClassVar

import pytest

from specdec.cli.folders import alone_in, safe_name
from specdec.cli.main import main
from specdec.errors import UserError

RANDOM = "model=random"


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

    def test_default_folders_are_named_by_the_strategy_and_never_shared(self, engine) -> None:
        for _ in range(2):
            assert main(["run", RANDOM, "strategy=ar"]) == 0
        folders = [folder for _, folder in engine.runs]
        assert len(set(folders)) == 2
        assert {folder.parent for folder in folders} == {Path("outputs/run/ar")}

    def test_a_complete_folder_is_not_run_again(self, engine, capsys) -> None:
        for _ in range(2):
            assert main(["run", RANDOM, "output_dir=out"]) == 0
        assert len(engine.runs) == 1
        assert "complete already" in capsys.readouterr().out

    def test_an_interrupted_run_is_gone_on_with(self, engine) -> None:
        engine.failing = {"speculative"}
        with pytest.raises(RuntimeError, match="planted"):
            main(["run", RANDOM, "output_dir=out"])
        assert status_of(Path("out")) == "failed"
        engine.failing = set()
        assert main(["run", RANDOM, "output_dir=out"]) == 0
        assert len(engine.runs) == 2
        assert status_of(Path("out")) == "ok"

    def test_ctrl_c_is_no_failure(self, engine, capsys) -> None:
        engine.failing, engine.error = {"speculative"}, KeyboardInterrupt()
        assert main(["run", RANDOM, "output_dir=out"]) == 130
        assert status_of(Path("out")) == "interrupted"
        assert "interrupted" in capsys.readouterr().err

    def test_two_processes_do_not_share_a_folder(self, engine, capsys) -> None:
        """Both took the folder for an interrupted run, and wrote every prompt's line twice."""
        Path("out").mkdir()
        with alone_in(Path("out")):
            assert main(["run", RANDOM, "output_dir=out"]) == 2
            assert main(["run", "-m", RANDOM, "seed=0,1", "output_dir=out"]) == 2
        assert capsys.readouterr().err.count("another process uses it") == 2
        assert engine.runs == []
        assert main(["run", RANDOM, "output_dir=out"]) == 0, "a lock ends with its owner"

    def test_a_full_disk_is_said_in_one_line(self, engine, monkeypatch, capsys) -> None:
        full = OSError(errno.ENOSPC, "No space left on device")

        def write(path: Path, text: str) -> None:
            if path.name == "status.json":
                raise full
            path.write_text(text, encoding="utf-8")

        monkeypatch.setattr("specdec.cli.folders.write_text", write)
        engine.failing, engine.error = {"speculative"}, full
        assert main(["run", RANDOM, "output_dir=out"]) == 1
        assert capsys.readouterr().err.startswith("specdec: No space left on device: make room")

    def test_trees_beyond_memory_are_said_in_one_line(self, engine, capsys) -> None:
        engine.failing, engine.error = {"speculative"}, MemoryError("Unable to allocate 60.6 GiB")
        assert main(["run", RANDOM, "output_dir=out"]) == 1
        assert "(Unable to allocate 60.6 GiB): choose smaller trees" in capsys.readouterr().err

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

    def test_user_errors_of_the_engine_are_one_paragraph(self, engine, capsys) -> None:
        engine.failing, engine.error = {"speculative"}, UserError("prompt 3 is\n too long")
        assert main(["run", RANDOM, "output_dir=out"]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == "specdec: prompt 3 is too long"

    def test_tracebacks_on_demand(self, engine, monkeypatch) -> None:
        monkeypatch.setenv("SPECDEC_TRACEBACK", "1")
        with pytest.raises(UserError):
            main(["run", RANDOM, "seed=-1"])

    def test_working_directory_stays(self, engine, tmp_path) -> None:
        assert main(["run", RANDOM]) == 0
        assert Path.cwd() == tmp_path


class TestSweep:
    SWEEP = ("run", "-m", RANDOM, "strategy=ar,best_first", "seed=0,13", "output_dir=sweep")

    def names(self) -> list[str]:
        return sorted(p.name for p in Path("sweep").iterdir() if p.is_dir())

    @pytest.mark.slow
    def test_one_folder_per_combination_named_by_it(self, engine) -> None:
        assert main(list(self.SWEEP)) == 0
        assert self.names() == [
            f"strategy={s},seed={n}" for s in ("ar", "best_first") for n in (0, 13)
        ]
        for config, folder in engine.runs:
            assert folder.name == f"strategy={config['strategy']['name']},seed={config['seed']}"
        records = json.loads(Path("sweep/sweep.json").read_text(encoding="utf-8"))
        assert [r["status"] for r in records] == ["ok"] * 4
        assert not list(Path("sweep").rglob(".hydra")), "config.yaml is the run's only record"

    @pytest.mark.slow
    def test_it_resumes_and_goes_on_after_failures(self, engine, capsys) -> None:
        engine.failing = {"ar"}
        assert main(list(self.SWEEP)) == 1
        assert len(engine.runs) == 4, "a failed job must not end the sweep"
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

    @pytest.mark.slow
    def test_a_sweep_over_other_values_does_not_mix_with_it(self, engine, capsys) -> None:
        assert main(list(self.SWEEP)) == 0
        assert main([*self.SWEEP, "max_new_tokens=5"]) == 2
        assert "max_new_tokens is 128 there and 5 here" in capsys.readouterr().err
        assert len(engine.runs) == 4

    def test_bad_combinations_are_found_before_the_first_job(self, engine, capsys) -> None:
        assert main(["run", "-m", RANDOM, "strategy=ar,best_frist"]) == 2
        assert main(["run", "-m", RANDOM, "strategy=best_first", "policy.bs=4,-4,x"]) == 2
        assert engine.runs == []

    @pytest.mark.slow
    def test_two_sweeps_started_in_the_same_second_do_not_meet(self, engine) -> None:
        for _ in range(2):
            assert main(["run", "-m", RANDOM, "strategy=ar", "seed=1,2"]) == 0
        assert len({folder for _, folder in engine.runs}) == 4

    @pytest.mark.slow
    def test_paths_as_values_do_not_nest_folders(self, engine) -> None:
        for part in ("a", "b"):
            Path(part).mkdir()
            Path(part, "p.txt").write_text("one\n", encoding="utf-8")
        words = ["run", "-m", RANDOM, "data=text", "data.path=a/p.txt,b/p.txt", "output_dir=sweep"]
        assert main(words) == 0
        assert len(self.names()) == 2

    def test_nothing_to_vary_is_refused(self, engine, capsys) -> None:
        assert main(["run", "-m", RANDOM]) == 2
        assert "-m" in capsys.readouterr().err

    @pytest.mark.slow
    def test_an_own_tree_is_swept_too(self, engine, tmp_path) -> None:
        (tmp_path / "tree" / "sampling").mkdir(parents=True)
        (tmp_path / "tree" / "sampling" / "hot.yaml").write_text(
            "temperature: 1.5\ntop_k: 0\ntop_p: 1.0\nno_repeat_ngram: 0\n", encoding="utf-8"
        )
        words = ["run", "-m", "--config-dir", "tree", RANDOM, "sampling=greedy,hot"]
        assert main(words) == 0
        assert [c["sampling"]["temperature"] for c, _ in engine.runs] == [0.0, 1.5]


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
        assert "results of `specdec compare`, not of `specdec run`" in capsys.readouterr().err
        assert main([*self.WORDS[:2], "strategies=[ar,staged,mixture]", *self.WORDS[3:]]) == 2


class TestLogger:
    def test_wandb_is_offline_unless_asked(self, engine, monkeypatch) -> None:
        inits, logged = [], []

        class Run:
            log, finish = staticmethod(logged.append), staticmethod(lambda: None)
            summary: ClassVar[dict[str, object]] = {}

            @staticmethod
            def define_metric(name: str, **about: object) -> None: ...

        fake = types.ModuleType("wandb")
        fake.__spec__ = ModuleSpec("wandb", None)
        fake.init = lambda **kwargs: inits.append(kwargs) or Run
        monkeypatch.setitem(sys.modules, "wandb", fake)
        engine.summary = {"strategy": "ar", "tokens_per_s": 3.0, "lossless": None}
        engine.summary["acceptance_by_depth"] = {"1": 0.5}
        assert main(["run", RANDOM, "strategy=ar", "logger=wandb", "output_dir=out"]) == 0
        assert (inits[0]["mode"], inits[0]["name"], inits[0]["dir"]) == ("offline", "ar", "out")
        assert Run.summary == {"tokens_per_s": 3.0}
        assert logged == [{"depth": 1, "curve/acceptance_by_depth": 0.5}]

    def test_missing_wandb_is_told_before_the_run(self, engine, monkeypatch, capsys) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert main(["run", RANDOM, "logger=wandb"]) == 2
        assert "pip install" in capsys.readouterr().err
        assert engine.runs == []


class TestTexts:
    @pytest.mark.parametrize("command", ["run", "compare", "train", "list", "report"])
    def test_every_command_explains_itself(self, command: str, capsys) -> None:
        assert main([command, "--help"]) == 0
        assert f"specdec {command}" in capsys.readouterr().out
        assert main(["--help"]) == 0
        assert f"specdec {command}" in capsys.readouterr().out

    def test_list_names_every_option(self, capsys) -> None:
        from specdec.config.options import GROUPS, options

        assert main(["list"]) == 0
        shown = capsys.readouterr().out.split()
        for group in GROUPS:
            assert set(options(group)) <= set(shown), group

    def test_cfg_prints_what_would_be_run(self, engine, capsys) -> None:
        from omegaconf import OmegaConf

        assert main(["run", "--cfg", RANDOM, "strategy=specpipe"]) == 0
        assert OmegaConf.create(capsys.readouterr().out).policy.width == 64
        assert main(["compare", "--cfg", RANDOM, "strategies=[ar]"]) == 0
        assert not engine.runs
        assert not engine.comparisons

    def test_a_closed_pipe_is_no_error(self) -> None:
        assert os.system(f"{_python()} -m specdec.cli.main list 2>err | head -1 >/dev/null") == 0
        assert Path("err").read_text(encoding="utf-8") == ""


def _python() -> str:
    root = Path(__file__).resolve().parents[2]
    return f"PYTHONPATH={root} {sys.executable}"


def test_names_of_folders_are_safe_and_differ() -> None:
    assert safe_name("strategy=ar,seed=1") == "strategy=ar,seed=1"
    assert safe_name("a/b") != safe_name("a-b")
    assert "/" not in safe_name("model.target=org/name")
    assert safe_name("../..") not in ("..", ".", "")
    assert len(safe_name("x" * 500)) < 200
