"""wandb, offline: what a run's folder holds is logged, and nothing asks for a network."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import specdec.runs.jobs
from specdec.cli.loggers import log_results
from specdec.cli.main import main
from specdec.config.options import options, own_values
from specdec.errors import UserError
from specdec.interfaces import Logger
from specdec.trace.recorder import Judgement
from tests.distributed.processes import wait_until
from tests.unit.test_results import comparison, config_of  # noqa: F401 - a fixture

JUDGED = (
    Judgement(rank=1, candidates=2, in_tree=True),
    Judgement(rank=0, candidates=2, in_tree=False),
)


@pytest.mark.slow
def test_wandb_logs_offline(
    comparison: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody answers
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = own_values(options("logger")["wandb"])
    judged = [[*one] for one in JUDGED]
    trees = {"requests": [{"steps": [{"commit": {"judged": judged}}]}]}
    (comparison / "trees.json").write_text(json.dumps(trees), encoding="utf-8")
    found = json.loads((comparison / "comparison.json").read_text(encoding="utf-8"))
    row = found["rows"][1]
    log_results([config_of("speculative", logger=logger)], [row], comparison)
    (run,) = (comparison / "wandb").glob("offline-run-*")
    (log,) = run.glob("*.wandb")
    # wandb's own process may write the last records after finish() has returned.
    wait_until(lambda: logged(log.read_bytes(), "speedup_wall"), "wandb's summary")
    raw = log.read_bytes()
    assert float(logged(raw, "speedup_wall")[-1]) == pytest.approx(2.0)
    assert float(logged(raw, "tokens_per_s")[-1]) == pytest.approx(20.0)
    assert logged(raw, "lossless") == [b"true"]
    assert b"DraftModelSource" in raw, "the configuration is with it"
    assert float(logged(raw, "rejections/share_accepted")[-1]) == pytest.approx(0.5)


def logged(raw: bytes, name: str) -> list[bytes]:
    """The JSON values that follow a key in wandb's log (protobuf: field 16, a string)."""
    pattern = rb"(?<![/\w])" + re.escape(name).encode() + rb"\x82\x01.([-+.e0-9]+|true|false)"
    return re.findall(pattern, raw, re.DOTALL)


class Recorder(Logger):
    """Keeps the strategies whose results it has received; refuses while ``refusal`` is set."""

    received: list[str] = []
    refusal = ""

    def check(self) -> None:
        if self.refusal:
            raise UserError(self.refusal)

    def log(self, config: Mapping[str, Any], row: Mapping[str, Any], folder: Path) -> None:
        self.received.append(str(config["strategy"]["name"]))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of commands that know logger=recorder, and whose results go to ``out``."""
    (tmp_path / "conf/logger").mkdir(parents=True)
    target = f"_target_: {Recorder.__module__}.Recorder\n"
    (tmp_path / "conf/logger/recorder.yaml").write_text(target, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Recorder, "received", [])
    model = ["model=random", "model.num_layers=2", "max_new_tokens=8", "data.limit=1"]
    return ["--config-dir", "conf", *model, "output_dir=out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rows"),
    [(["run", "strategy=ar"], ["ar"]), (["compare", "strategies=[ar,suffix]"], ["ar", "suffix"])],
)
def test_the_logger_is_no_part_of_what_a_run_computes(
    command: list[str], rows: list[str], tree: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are decoded once, and each logger receives them once, also afterwards."""
    words = [*command, *tree]
    assert main(words) == 0

    def decoded_again(*_: Any) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(specdec.runs.jobs, "run_job", decoded_again)
    monkeypatch.setattr(specdec.runs.jobs, "compare_jobs", decoded_again)
    for _ in range(2):
        assert main([*words, "logger=recorder"]) == 0
        assert Recorder.received == rows
        monkeypatch.setattr(Recorder, "refusal", "not asked again")
    assert main([*words, "seed=1"]) == 2, "another seed is another run"


@pytest.mark.slow
def test_a_logger_that_cannot_work_is_refused_before_decoding(
    tree: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "strategy=ar", *tree, "logger=recorder"]
    monkeypatch.setattr(Recorder, "refusal", "nobody is logged in")
    assert main(words) == 2
    assert "nobody is logged in" in capsys.readouterr().err
    assert not Path("out").exists()
    monkeypatch.setattr(Recorder, "refusal", "")
    assert main(words) == 0
    assert Recorder.received == ["ar"]


@pytest.mark.slow
def test_a_login_that_fails_is_found_before_decoding(
    tree: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(Path.cwd()))  # where no login is stored
    monkeypatch.setenv("NETRC", str(Path.cwd() / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert main(["run", *tree, "logger=wandb", "logger.mode=online"]) == 2
    assert "run `wandb login`" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_refused_command_leaves_its_folder_to_the_corrected_one(tree: list[str]) -> None:
    """The refusal comes when the parts are built, after the folder was claimed."""
    words = ["compare", "strategies=[suffix]", *tree]
    assert main([*words, "verifier=rejection"]) == 2
    assert not Path("out").exists()
    assert main(words) == 0
    before = sorted(Path("out").iterdir())
    assert main([*words, "seed=1"]) == 2
    assert sorted(Path("out").iterdir()) == before, "a run that is there stays"
