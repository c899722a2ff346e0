"""Parts outside this repository: one class and one YAML for each kind."""

import csv
import json
import sys
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.config.job import run_job_of
from specdec.errors import UserError
from tests.config.outside import OUTSIDE, make_folder

SMALL = ["model=random", "data.limit=3", "max_new_tokens=12"]
KINDS = ["source", "policy", "verifier", "executor", "scheduler", "model pair"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The outside folder, as the working directory; its modules are imported afresh."""
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for part in OUTSIDE.values():
        monkeypatch.delitem(sys.modules, part.module, raising=False)
    return tmp_path


def command(name: str, *words: str) -> int:
    return main([name, "--config-dir", "conf", *words])


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_compares(folder: Path, kind: str) -> None:
    """The other kinds run in tests of their own, below."""
    part = OUTSIDE[kind]
    assert command("compare", *SMALL, part.rows, *part.overrides, "output_dir=out") == 0
    rows = json.loads((folder / "out" / "comparison.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 2
    assert rows[1]["lossless"] is True or part.lossy


@pytest.mark.parametrize("kind", OUTSIDE)
def test_the_annotation_of_the_author_bounds_the_key(folder: Path, kind: str) -> None:
    part = OUTSIDE[kind]
    with pytest.raises(UserError, match=part.bad.partition("=")[0]):
        run_job_of([*SMALL, *part.overrides, part.bad], [folder / "conf"])


def test_an_outside_clock_gives_the_times(folder: Path) -> None:
    """Virtual times do not depend on the machine: a pass reads 14 GB at 2000 GB/s."""
    words = [*SMALL, "strategy=ar", "clock=roofline", "trace=true", "output_dir=out"]
    assert command("run", *words) == 0
    summary = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["clock"] == "simulated"
    assert summary["tokens_per_s"] == pytest.approx(2000 / 14)
    assert (folder / "out" / "trace.json").is_file()


@pytest.mark.slow
def test_an_outside_scheduler_chooses_the_order(folder: Path) -> None:
    """Two of three prompts are decoded at a time, of 1 to 10 tokens; all are as long to decode."""
    words = ["data=csv", "data.path=prompts.csv", "serving=shortest", "batch_size=2"]
    words += ["strategy=ar", "ignore_eos=true", "max_new_tokens=12", "output_dir=out"]
    assert command("run", *words) == 0
    order = [line["id"] for line in lines(folder / "out" / "requests.jsonl")]
    assert order[-1] == 0, "the longest prompt comes first in the file and ends last"
    assert command("run", *[w for w in words if "shortest" not in w][:-1], "output_dir=fifo") == 0
    assert lines(folder / "fifo" / "requests.jsonl")[0]["id"] == 0


@pytest.mark.slow
def test_an_outside_reader_gives_prompts_and_provenance(folder: Path) -> None:
    words = ["data=csv", "data.path=prompts.csv", "data.limit=2", "max_new_tokens=4"]
    assert command("run", *words, "output_dir=out") == 0
    assert [line["id"] for line in lines(folder / "out" / "requests.jsonl")] == [0, 1]
    record = json.loads((folder / "out" / "provenance.json").read_text(encoding="utf-8"))
    assert record["data"]["file"] == "prompts.csv"
    assert len(record["data"]["sha256"]) == 64


@pytest.mark.slow
def test_an_outside_logger_gets_every_row(folder: Path) -> None:
    words = [*SMALL, "strategies=[ar,speculative]", "logger=csv", "output_dir=out"]
    assert command("compare", *words) == 0
    with (folder / "results.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["strategy"] for row in rows] == ["ar", "speculative"]
    assert float(rows[0]["acceptance_length"]) == 1.0


def test_the_tree_beside_the_measurements_of_a_real_model_composes() -> None:
    tree = Path(__file__).parents[2] / "experiments/smollm2/conf"
    job = run_job_of(["strategy=eagle3_small", "model=random"], [tree])
    assert job.config["policy"]["bs"] == 6
