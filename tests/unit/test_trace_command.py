"""Tree pages and ``specdec trace``: two runs side by side, and runs that cannot be shown."""

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
from specdec.trace.files import Track, tracks_page


def trees(*paths: int, prompt: int = 0, prefix_len: int = 5) -> dict[str, Any]:
    """A run that accepts so many draft tokens in each step, and then the target's own.

    Every tree is a root, the accepted chain and one sibling; accepted tokens are their positions.
    """
    steps: list[dict[str, Any]] = []
    position = prefix_len - 1
    for number, accepted in enumerate(paths):
        root = 100 * number
        chain = [
            [root + depth, root + depth - 1, position + depth, position + depth, -0.1, 0]
            for depth in range(1, accepted + 1)
        ]
        sibling = [root + 50, root, 900 + number, position + 1, -2.0, 0]
        ids = list(range(root, root + accepted + 1))
        position += accepted + 1
        commit = {"kind": "miss", "retired": ids, "next_token": position, "root": root + 100}
        steps.append(
            {
                **{"step": number, "time_s": 0.01 * number, "submitted": ids},
                "nodes": [[root, -1, position - accepted - 1, position - accepted - 1, 0.0, 0]]
                + [*chain, sibling],
                **{"answers": [[i, 0] for i in ids], "commit": commit},
            }
        )
    return {
        **{"clock": "simulated", "latency": 1, "truncated": False, "text": {}},
        "requests": [{"id": prompt, "prefix_len": prefix_len, "steps": steps}],
    }


def data_of(page: str) -> dict[str, Any]:
    start = page.index("const data = ") + len("const data = ")
    return dict(json.JSONDecoder().raw_decode(page[start:])[0])


def test_two_runs_are_on_one_page() -> None:
    page = tracks_page(
        [Track("one <b>", trees(1, 2), "#123456"), Track("two", trees(0, 0, 0))], title="a & b"
    )
    assert [track["title"] for track in data_of(page)["tracks"]] == ["one <b>", "two"]
    assert ".t0 { background: #123456; }" in page
    assert "one <b>" not in page


def test_runs_that_cannot_be_aligned_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompt in common"):
        tracks_page([Track("a", trees(1)), Track("b", trees(1, prompt=1))], title="")
    with pytest.raises(ValueError, match="5 and 6 tokens"):
        tracks_page([Track("a", trees(1)), Track("b", trees(1, prefix_len=6))], title="")
    with pytest.raises(ValueError, match="no step is on record"):
        tracks_page([Track("a", trees())], title="")


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_command_shows_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_of(tmp_path / "one", "speculative", trees(1, 2))
    two = run_of(tmp_path / "two", "best_first", trees(0, 0, 0))
    assert main(["trace", str(one), str(two)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == str(one / "beside.html")
    tracks = data_of(Path(line).read_text(encoding="utf-8"))["tracks"]
    assert [track["title"] for track in tracks] == ["speculative", "best_first"]
