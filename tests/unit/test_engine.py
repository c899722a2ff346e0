"""What runs and comparisons do before anything is decoded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.report.results import read_requests
from specdec.runs import jobs as engine

MODEL = {"kind": "random", "max_positions": 32}
CONFIG = {
    "model": MODEL,
    "data": {"limit": 1},
    "strategy": {"name": "ar", "kind": "parts"},
    "max_new_tokens": 16,
    "seed": 0,
}


def test_made_up_prompts_must_fit_the_positions() -> None:
    """Beyond its last position a family with learnt ones fails, one with rotary ones goes on."""
    assert len(engine.prepare(CONFIG)[1]) == 1
    with pytest.raises(UserError, match=r"max_new_tokens=17 .* 16 tokens .* 32 positions"):
        engine.prepare({**CONFIG, "max_new_tokens": 17})


def test_a_row_that_cannot_be_built_leaves_no_ranks_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def build(cfg: dict[str, Any], *_: object) -> object:
        name = cfg["strategy"]["name"]
        if name == "bad":
            raise UserError("cannot be built")
        return SimpleNamespace(name=name, close=lambda: closed.append(name))

    monkeypatch.setattr(engine, "build_runner", build)
    rows = [{**CONFIG, "strategy": {"name": n, "kind": "parts"}} for n in ("ar", "ours", "bad")]
    with pytest.raises(UserError, match="cannot be built"):
        engine.compare_jobs(rows, tmp_path, 1, _Watching(10**6))
    assert closed == ["ar", "ours"]


class _Watching:
    """Told of progress; interrupts the work when so many prompts are done."""

    def __init__(self, after: int) -> None:
        self.left = after

    def phase(self, label: str, total: int | None = None) -> None: ...

    def note(self, text: str) -> None: ...

    def advance(self, count: int = 1, detail: str = "") -> None:
        self.left -= count
        if self.left <= 0:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path: Path, batch_size: int) -> None:
    """It began anew and wrote behind the old lines: two lines for every prompt done before."""
    words = ["model=random", "model.num_layers=2", "clock=simulated", "data.limit=3"]
    words += ["max_new_tokens=6", f"batch_size={batch_size}"]
    rows = [run_job_of([f"strategy={name}", *words]).config for name in ("ar", "speculative")]

    def compare(folder: str, after: int) -> dict[str, Any]:
        return engine.compare_jobs(rows, tmp_path / folder, 2, _Watching(after))

    whole = compare("whole", 10**6)
    with pytest.raises(KeyboardInterrupt):
        compare("parts", 8)  # of 12, in the second repeat
    records = read_requests(tmp_path / "parts" / "requests.jsonl")
    assert len(records) == 8
    again = compare("parts", 10**6)
    records = read_requests(tmp_path / "parts" / "requests.jsonl")
    assert len({(r.strategy, r.repeat, r.result.id) for r in records}) == len(records) == 12
    same = ("strategy", "new_tokens", "lossless", "num_compared", "repeats")
    same += ("acceptance_length",) if batch_size == 1 else ()
    for there, here in zip(whole["rows"], again["rows"], strict=True):
        assert {k: there.get(k) for k in same} == {k: here.get(k) for k in same}
