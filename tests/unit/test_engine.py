"""What runs and comparisons do before anything is decoded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import engine
from specdec.errors import UserError

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
        engine.compare_jobs(rows, tmp_path, 1, SimpleNamespace(phase=lambda *_: None))
    assert closed == ["ar", "ours"]
