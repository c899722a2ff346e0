"""The experiments on drafters at a small size: what they write, their intervals, their pages."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.drafters import lateness, other_tokenizer, page, presets, sources
from experiments.drafters.measure import PARTS, Measured, difference, ratio
from specdec.metrics.counters import RequestCounters
from tests.states import new_result

SMALL = ["--prompts", "2", "--tokens", "4"]


def where(tmp_path: Path) -> list[str]:
    return [f"--{name}={tmp_path / name}" for name in ("out", "results")]


def written(name: str, tmp_path: Path) -> dict:
    path = tmp_path / "results" / f"{name}-stdlib-t06.json"
    return json.loads(path.read_text("utf-8"))  # type: ignore[no-any-return]


def counted(counts: list[list[float]]) -> Measured:
    value, low, high = ratio(np.array(counts))
    rest = {"steps_per_token": 1.0, "loop_share": 0.0, "tokens": 8}
    return Measured(measure="hit rate", value=value, low=low, high=high, counts=counts, **rest)


def test_the_interval_is_over_prompts() -> None:
    counts = np.array([[1.0, 2.0], [3.0, 4.0], [2.0, 4.0]])
    value, low, high = ratio(counts)
    assert value == 0.6
    assert 0.5 <= low < value < high <= 0.75
    assert ratio(np.array([[1.0, 2.0]] * 5)) == (0.5, 0.5, 0.5)


def test_a_difference_is_over_the_same_prompts() -> None:
    """Prompts differ by far more than the two runs, which an interval of each run would hide."""
    one = counted([[1.0, 10.0], [5.0, 10.0], [9.0, 10.0]])
    other = counted([[2.0, 10.0], [6.0, 10.0], [10.0, 10.0]])
    assert other.low < one.high
    assert difference(other, one) == pytest.approx((0.1, 0.1, 0.1))


@pytest.mark.slow
def test_lateness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "GROUPS", {})
    monkeypatch.setattr(lateness, "PIPELINES", ("specpipe",))
    small = [*SMALL, "--data", "stdlib", "--stages", "1", "3"]
    lateness.main([*small, *where(tmp_path)])
    found = written("lateness", tmp_path)
    drafts = ["with the answers", "draft model"]  # early ones gain no step
    assert [row["draft"] for row in found["rows"]] == drafts
    command = "python -m experiments.drafters.lateness --prompts 2"
    assert all(row["command"].startswith(command) for row in found["rows"])
    assert all(row["measured"]["steps_per_token"] >= 1.0 for row in found["rows"])


def test_a_later_hit_rate_leaves_the_first_verdict_out() -> None:
    rate = PARTS["later hit rate"]
    assert rate(new_result(0, RequestCounters(hits=2, misses=1), (0, 0, -1))) == (1, 2)
    assert rate(new_result(0, RequestCounters(hits=1, misses=2), (-1, 0, -1))) == (1, 2)


def test_early_features_gain_the_steps_behind_their_highest_layer() -> None:
    """The highest stream of the bundled head enters layer 21 of 24."""
    assert [lateness.steps_gained(n) for n in (1, 2, 4, 8, 12, 16, 24)] == [0, 0, 0, 1, 1, 3, 3]


@pytest.mark.slow
def test_sources_by_executor(tmp_path: Path) -> None:
    sources.main([*SMALL, "--data", "stdlib", "--only", "exit", *where(tmp_path)])
    found = {row["executor"]: row["measured"] for row in written("sources", tmp_path)["rows"]}
    assert list(found) == list(sources.EXECUTORS)
    assert [name for name, row in found.items() if row is None] == ["two groups"]
    again = [*SMALL, "--data", "stdlib", "--only", "suffix", *where(tmp_path)]
    sources.main(again)  # the rows of other sources stay
    rows = written("sources", tmp_path)["rows"]
    assert [row["source"] for row in rows] == ["exit"] * 3 + ["suffix"] * 3
    assert [row["measured"] for row in rows[:3]] == list(found.values())
    assert rows[0]["command"] != rows[3]["command"]


@pytest.mark.slow
def test_a_draft_with_all_merges_is_the_same_draft(tmp_path: Path) -> None:
    """Renumbered only: every count is that of the draft itself."""
    other_tokenizer.main([*SMALL, "--data", "stdlib", "--shares", "100", *where(tmp_path)])
    found = written("other_tokenizer", tmp_path)
    for policy in other_tokenizer.POLICIES:
        own, same = (r for r in found["rows"] if r["policy"] == policy)
        for row in (own, same):
            row["measured"].pop("cpu_s")
        assert own["measured"] == same["measured"]
        assert same["shared"] == 4096
        assert same["measured"]["value"] > 1.0


@pytest.mark.parametrize("name", page.PAGES)
def test_the_pages_have_the_tables_of_the_stored_results(name: str) -> None:
    text = (page.ROOT / name).read_text("utf-8")
    assert page.rendered(text) == text
    assert text.count("<!-- end -->") == sum(
        text.count(f"<!-- {table} -->") for table in page.TABLES
    )


@pytest.mark.slow
def test_presets_on_given_texts(tmp_path: Path) -> None:
    presets.main(["--data", "edits", "--prompts", "2", "--tokens", "40", *where(tmp_path)])
    path = tmp_path / "results" / "presets-edits-t06.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [row["preset"] for row in rows] == list(presets.COPYING)
    assert all(row["kinds"] == ["rewrite"] * 2 for row in rows)
    assert rows[0]["measured"]["tokens"] == rows[-1]["measured"]["tokens"] > 40
