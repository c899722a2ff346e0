"""The experiments on drafters at a small size: what they write, and their intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.drafters import lateness, other_tokenizer, sources
from experiments.drafters.measure import ratio

SMALL = ["--prompts", "2", "--tokens", "4", "--data", "stdlib"]


def where(tmp_path: Path) -> list[str]:
    return [f"--{name}={tmp_path / name}" for name in ("out", "results", "images")]


def test_the_interval_is_over_prompts() -> None:
    counted = np.array([[1.0, 2.0], [3.0, 4.0], [2.0, 4.0]])
    value, low, high = ratio(counted)
    assert value == 0.6
    assert 0.5 <= low < value < high <= 0.75
    assert ratio(np.array([[1.0, 2.0]] * 5)) == (0.5, 0.5, 0.5)


def test_lateness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "GROUPS", {})
    monkeypatch.setattr(lateness, "PIPELINES", ("specpipe",))
    lateness.main([*SMALL, "--stages", "3", *where(tmp_path)])
    found = json.loads((tmp_path / "results" / "lateness.json").read_text("utf-8"))
    assert [row["draft"] for row in found["rows"]] == list(lateness.DRAFTS)
    assert found["command"].startswith("python -m experiments.drafters.lateness --prompts 2")
    assert all(row["measured"]["steps_per_token"] >= 1.0 for row in found["rows"])
    assert (tmp_path / "images" / "eagle_lateness.png").is_file()


def test_sources_by_executor(tmp_path: Path) -> None:
    sources.main([*SMALL, "--only", "exit", *where(tmp_path)])
    table = (tmp_path / "results" / "sources.md").read_text("utf-8").splitlines()
    assert len(table) == 3
    assert table[2].count("refused") == 1  # two groups have no early exit


def test_a_draft_with_all_merges_is_the_same_draft(tmp_path: Path) -> None:
    """Renumbered only: every count is that of the draft itself."""
    other_tokenizer.main([*SMALL, "--shares", "100", *where(tmp_path)])
    found = json.loads((tmp_path / "results" / "other_tokenizer.json").read_text("utf-8"))
    for policy in other_tokenizer.POLICIES:
        own, same = (r for r in found["rows"] if r["policy"] == policy)
        assert own["measured"] == same["measured"]
        assert same["shared"] == 4096
        assert same["measured"]["value"] > 1.0
