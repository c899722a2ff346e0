"""``specdec trace``: runs that cannot be shown."""

import shlex
import sys
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.cli.trace import draw
from specdec.errors import UserError
from specdec.trace.files import tree_page


def test_a_run_without_steps_is_refused() -> None:
    trees = {"requests": [{"id": 0, "prefix_len": 5, "steps": []}]}
    with pytest.raises(ValueError, match="no step is on record"):
        tree_page(trees, title="")


@pytest.mark.slow
def test_an_untraced_run_names_the_command_that_traces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own folder holds another configuration, so the command names a new one."""
    plain = tmp_path / "plain run"
    words = ["strategy=specpipe", "model=synthetic", "clock=simulated", "data.limit=1"]
    words += ["executor.stages=2", "max_new_tokens=8", f"output_dir={plain}"]
    monkeypatch.setattr(sys, "argv", ["specdec", "run", *words])
    assert main(["run", *words]) == 0
    with pytest.raises(UserError) as refused:
        draw(plain)
    told = str(refused.value)
    assert "without trace=true" in told
    again = shlex.split(told[told.index("specdec run") :])
    assert again[2:-1] == [*words[:-1], "trace=true"]
    assert main(again[1:]) == 0
    assert main(["trace", again[-1].partition("=")[2]]) == 0
