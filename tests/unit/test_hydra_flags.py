"""Hydra's flags and overrides work, or are refused with what to do instead."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec import Decoder, UserError
from specdec.cli.arguments import read_values
from specdec.cli.main import main
from specdec.parts.fields import Count, Text
from specdec.report.results import row_name, swept_values

RANDOM = "model=random"
EXPERIMENT = """# @package _global_
seed: 7
hydra: {mode: MULTIRUN, sweeper: {params: {max_new_tokens: "3,4"}}}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tree").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.slow
def test_the_sweep_of_an_experiment_runs(engine, elsewhere: Path) -> None:
    (elsewhere / "tree" / "experiment").mkdir()
    (elsewhere / "tree" / "experiment" / "table.yaml").write_text(EXPERIMENT, encoding="utf-8")
    words = ["-cd", "tree", "+experiment=table", "output_dir=out", "hydra/sweeper=basic"]
    assert main(["run", RANDOM, *words]) == 0
    assert [f.name for _, f in engine.runs] == ["max_new_tokens=3", "max_new_tokens=4"]
    assert all(config["seed"] == 7 for config, _ in engine.runs)


def test_jobs_of_a_sweep_find_the_profiles_of_a_tree(engine, elsewhere: Path) -> None:
    """The jobs looked for them in the library's tree only."""
    (elsewhere / "tree" / "profile").mkdir()
    profile = "costs: {stage: {tokens: [1], ms: [2.0]}}"
    (elsewhere / "tree" / "profile" / "mine.yaml").write_text(profile, encoding="utf-8")
    words = ["-cd", "tree", "clock=simulated", "clock.profile=mine", "seed=1,2", "output_dir=out"]
    assert main(["run", "-m", RANDOM, *words]) == 0
    assert [config["clock"]["costs"]["stage"]["ms"] for config, _ in engine.runs] == [[2.0]] * 2


def test_config_dirs_of_python_find_classes_beside_the_folder(elsewhere: Path) -> None:
    """As ``--config-dir`` does: a tree is code."""
    (elsewhere / "beside_the_tree.py").write_text("from specdec.policies import Chain as Mine\n")
    (elsewhere / "tree" / "policy").mkdir()
    text = "_target_: beside_the_tree.Mine\ngamma: 2\n"
    (elsewhere / "tree" / "policy" / "mine.yaml").write_text(text, encoding="utf-8")
    with Decoder([RANDOM, "policy=mine", "max_new_tokens=4"], config_dirs=["tree"]) as decoder:
        assert len(decoder.generate([1, 2, 3]).tokens) == 4
    with pytest.raises(UserError, match="nowhere is not a folder"):
        Decoder([RANDOM], config_dirs=["nowhere"])


@dataclass(frozen=True)
class Keys:
    counts: Sequence[Count] = (1,)
    name: Text = "law"


@pytest.mark.parametrize(
    ("words", "counts", "name"),
    [
        ([], (1,), "law"),
        (["counts=[1,3]", "name=7"], [1, 3], "7"),
        (["counts=1,3", "name=a b"], [1, 3], "a b"),
        (["counts=4", 'name="a, (b)"'], [4], "a, (b)"),
    ],
)
def test_every_command_reads_keys_in_the_grammar_of_hydra(words, counts, name) -> None:
    folders, keys = read_values(["runs/seed=1", *words], Keys, "one folder")
    assert (folders, keys) == (["runs/seed=1"], Keys(counts, name))


@pytest.mark.slow
def test_a_clone_named_like_the_package_does_not_shadow_it(tmp_path: Path) -> None:
    """In the folder above a clone, ``specdec`` is a folder without ``__init__.py``."""
    clone = tmp_path / "specdec"
    clone.mkdir()
    (clone / "README.md").touch()
    root = Path(__file__).resolve().parents[2]
    code = (
        f"import sys; sys.path.append({str(root)!r}); import specdec;"
        "print(specdec.__file__, *dir(specdec)); help(specdec)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    path, *names = done.stdout.splitlines()[0].split()
    assert Path(path) == root / "specdec" / "__init__.py"
    assert {"Decoder", "generate", "verify", "UserError"} <= set(names)
    assert "generate" in done.stdout.partition("Help on package")[2]


@pytest.mark.slow
def test_a_sweep_ends_with_one_table(capsys, elsewhere: Path) -> None:
    """Its rows are the swept values, in the order of numbers; seeds are no axis of the plot."""
    words = ["-m", RANDOM, "policy.gamma=2,10", "seed=0,1", "clock=simulated", "output_dir=out"]
    assert main(["run", *words, "data.limit=1", "max_new_tokens=4"]) == 0
    table = Path("out/sweep.md").read_text(encoding="utf-8")
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| g")]
    assert names == [f"gamma={gamma}, seed={seed}" for gamma in (2, 10) for seed in (0, 1)]
    assert Path("out/sweep.png").is_file()
    assert names[-1] in capsys.readouterr().out
    values = {"strategy": "specpipe", "policy.arms": "[1,a,2]", "data.limit": "4"}
    job = ",".join(f"{key}={value}" for key, value in values.items())
    assert swept_values(job) == values
    assert swept_values("ar") == {}
    assert row_name(swept_values(job)) == "specpipe, arms=[1,a,2], limit=4"
