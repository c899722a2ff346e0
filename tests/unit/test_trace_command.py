"""``specdec trace`` of folders without a trace, and of two runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.cli.trace import draw
from specdec.errors import UserError
from tests.unit.test_tree_page import data_of, trees

pytestmark = pytest.mark.slow


def test_an_untraced_run_names_the_command_that_traces_it(tmp_path: Path) -> None:
    """Its own folder holds another configuration, so the command names a new one."""
    plain = tmp_path / "plain run"
    words = ["strategy=specpipe", "model=synthetic", "clock=simulated", "data.limit=1"]
    words += ["executor.stages=2", "max_new_tokens=8", f"output_dir={plain}"]
    command = [sys.executable, "-m", "specdec.cli.main", "run", *words]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    with pytest.raises(UserError) as refused:
        draw(plain)
    told = str(refused.value)
    assert "without trace=true" in told
    again = shlex.split(told[told.index("specdec run") :])
    assert again[2:-1] == [*words[:-1], "trace=true"]
    assert main(again[1:]) == 0
    assert main(["trace", again[-1].partition("=")[2]]) == 0


def run_of(folder: Path, strategy: str, content: dict[str, Any]) -> Path:
    folder.mkdir()
    config = {"strategy": {"name": strategy}}
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    (folder / "trees.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


class TestTwoRuns:
    def test_they_are_on_one_page(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        one = run_of(tmp_path / "one", "speculative", trees(1, 2))
        two = run_of(tmp_path / "two", "best_first", trees(0, 0, 0))
        assert main(["trace", str(one), str(two)]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line == str(one / "beside.html")
        tracks = data_of(Path(line).read_text(encoding="utf-8"))["tracks"]
        assert [track["title"] for track in tracks] == ["speculative", "best_first"]
