"""A researcher's own strategy: one file and one YAML, outside this repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.config.comparison import compose_comparison
from specdec.config.job import run_job_of
from specdec.errors import UserError

POLICY = '''
class Greedy:
    """A policy of one's own."""

    def __init__(self, *, runner: object = None, reach: int, shapes: list[int] | None = None):
        raise AssertionError("checking a configuration must not build anything")

    open = held_nodes = select = overlap = commit = close = (lambda self, *args: None)
'''
PRESET = """# @package _global_
# Mine.
defaults:
  - override /source: draft_model
strategy: {name: mine, title: my own, kind: parts, baseline: false}
"""


@pytest.fixture
def own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mypolicies.py").write_text(POLICY, encoding="utf-8")
    tree = tmp_path / "conf"
    (tree / "strategy").mkdir(parents=True)
    (tree / "policy").mkdir()
    (tree / "strategy" / "mine.yaml").write_text(
        PRESET.replace("draft_model\n", "draft_model\n  - override /policy: greedy\n"),
        encoding="utf-8",
    )
    (tree / "policy" / "greedy.yaml").write_text(
        "_target_: mypolicies.Greedy\nreach: 3\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tree


def test_run_and_compare_find_it(own_tree: Path) -> None:
    job = run_job_of(["strategy=mine", "model=random", "policy.reach=5"], [own_tree])
    assert job.config["policy"] == {"_target_": "mypolicies.Greedy", "reach": 5}
    rows = compose_comparison(["strategies=[ar,mine]", "model=random"], [own_tree])
    assert [job.name for job in rows.jobs] == ["ar", "mine"]


def test_list_shows_it(own_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--config-dir", str(own_tree), "strategies"]) == 0
    assert "my own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("_target_: mypolicies.Greedy\nreech: 3\n", "reach"),
        ("_target_: mypolicies.Greedy\n", "lacks reach"),
        ("_target_: mypolicies.Greedy\nreach: far\n", "reach='far'.*valid integer"),
        ("_target_: mypolicies.Greedy\nreach: 3\nshapes: [a]\n", r"shapes\[0\]='a'"),
        ("_target_: mypolicies.Greedy\nreach: 3\nrunner: 7\n", "runner"),
        ("_target_: mypolicies.Gredy\nreach: 3\n", "Gredy"),
        ("_target_: nowhere.Greedy\nreach: 3\n", "nowhere"),
        ("_target_: os.system\nreach: 3\n", "not a class"),
        ("_target_: math.pi\nreach: 3\n", "math.pi"),
        ("reach: 3\n", "_target_"),
    ],
)
def test_a_wrong_yaml_is_refused_before_anything_is_built(
    own_tree: Path, text: str, word: str
) -> None:
    (own_tree / "policy" / "greedy.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=word):
        run_job_of(["strategy=mine", "model=random"], [own_tree])
