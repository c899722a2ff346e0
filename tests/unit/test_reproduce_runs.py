"""How ``specdec reproduce`` runs items: bands, repeats, sets, processes, earlier results."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from experiments.pipelines.over_sets import _combined
from experiments.pipelines.samplings import _accuracy_fall, _tbt_change
from experiments.reproduce.drafts import known_bands
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import all_items
from experiments.reproduce.running import Settings, run_item
from specdec.errors import UserError

ITEMS = all_items()
PROFILES = Path("conf/profile")


def settings(out: Path, **changed: Any) -> Settings:
    facts = {
        "command": ["specdec", "reproduce"],
        "hardware": {"machine": "m", "cores": 2},
        "time": "now",
        "revision": "r",
        "code": "c",
    }
    start = Settings(out=out, runs=out, facts=facts, quick=True, resume=True)
    return replace(start, **changed)


# Bands.


def test_both_ends_of_every_band_exist_and_differ_in_stage_times_only() -> None:
    low, high = known_bands().values()
    assert set(low) == set(high)
    for name in low:
        flat, rising = (
            yaml.safe_load((PROFILES / f"{end[name]}.yaml").read_text(encoding="utf-8"))
            for end in (low, high)
        )
        assert flat["costs"]["stage"]["ms"][0] == flat["costs"]["stage"]["ms"][1]
        assert rising["costs"]["stage"]["ms"][0] < rising["costs"]["stage"]["ms"][1]
        for side in (flat, rising):
            side["costs"]["stage"].pop("ms")
        for key in ("costs", "drafts", "draft_name", "stages"):
            assert flat[key] == rising[key], f"{name} {key}"


# Repeats and sets.


def outcome(*requests: tuple[int, float, int, int, int]) -> Any:
    """A run: per request id, seconds, tokens, hits and answers."""
    results = [
        SimpleNamespace(
            id=at,
            output=[0] * tokens,
            counters=SimpleNamespace(hits=hits, answers=answers),
            seconds=seconds,
        )
        for at, seconds, tokens, hits, answers in requests
    ]
    total = sum(r[1] for r in requests) / sum(r[2] for r in requests)
    return SimpleNamespace(results=results, tbt_ms=1e3 * total)


def test_repeats_are_pooled_by_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    times = lambda results: [(r.seconds, len(r.output)) for r in results]  # noqa: E731
    monkeypatch.setattr("experiments.pipelines.samplings.times_of", times)
    plain = outcome((0, 10.0, 10, 9, 10), (1, 20.0, 20, 18, 20))
    repeats = [
        outcome((0, 12.0, 10, 8, 10), (1, 24.0, 20, 16, 20)),
        outcome((1, 22.0, 20, 17, 20), (0, 11.0, 10, 9, 10)),
    ]
    value, (low, high), text = _tbt_change(plain, repeats)
    assert value == pytest.approx(15.0)
    assert low is not None
    assert high is not None
    assert low <= value <= high
    assert "+10.0 to +20.0" in text
    fall, _ = _accuracy_fall(plain, repeats)
    assert fall == pytest.approx(100 * (0.9 - 50 / 60))


def test_the_mean_of_independent_sets_has_a_narrower_interval() -> None:
    assert _combined([(2.0, 1.7), (3.0, 2.6)]) == pytest.approx(0.25)
    assert _combined([(2.0, None), (3.0, 2.6)]) is None


# Runs.


def test_a_result_is_kept_only_under_the_same_conditions(tmp_path: Path) -> None:
    item = ITEMS["swiftspec/table7"]
    first = run_item(item, settings(tmp_path))
    assert not first.kept
    assert run_item(item, settings(tmp_path)).kept
    facts = settings(tmp_path).facts
    for changed in (
        {"resume": False},
        {"quick": False},
        {"facts": {**facts, "revision": "other"}},
        {"facts": {**facts, "code": "other"}},
    ):
        run_item(item, settings(tmp_path))
        assert not run_item(item, settings(tmp_path, **changed)).kept, changed


def test_a_failed_result_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = ITEMS["swiftspec/table7"]

    def broken(*_: Any) -> Findings:
        raise UserError("no data")

    with monkeypatch.context() as patch:
        patch.setattr(type(item), "build", broken)
        assert run_item(item, settings(tmp_path)).failed
    again = run_item(item, settings(tmp_path))
    assert not again.kept
    assert not again.failed
