"""How ``specdec reproduce`` runs items: bands, repeats, sets, processes, earlier results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from experiments.pipelines.over_sets import _combined
from experiments.pipelines.samplings import _accuracy_fall, _tbt_change
from experiments.reproduce import running
from experiments.reproduce.document import _prose
from experiments.reproduce.drafts import Draft, drafts, known_bands, make_draft
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import all_items
from experiments.reproduce.lab import Lab
from experiments.reproduce.running import Settings, run_item, run_items
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


# ---------------------------------------------------------------------- bands


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


def test_calibrated_rows_on_assumed_stage_times_come_at_both_ends(tmp_path: Path) -> None:
    """Every item with a calibrated draft on such a profile; the overrides name the right one."""
    lab, banded = Lab(folder=tmp_path, quick=True), 0
    for item in ITEMS.values():
        calibrated = [
            n for n in item.config.get("drafts", ()) if n.startswith(("pipespec", "fast"))
        ]
        if not calibrated:
            continue
        text = str(item.config)
        on_a_band = "clock.profile=specpipe_" in text or "clock.profile=pipedec_" in text
        found = list(drafts(calibrated, item, lab, Findings()))
        assert len(found) == (2 if on_a_band else 1) * len(calibrated), item.id
        assert len({draft.title for draft in found}) == len(found)
        assert len({draft.short for draft in found}) == len(found)
        banded += on_a_band
        assert [bool(draft.swapped) for draft in found] == [True, False] * (len(found) // 2) or (
            not on_a_band
        )
        for draft in found[: 2 * on_a_band]:
            words = draft.words("clock.profile=specpipe_8x3090", "clock.profile=vllm_8x3090")
            assert words[-2] == f"clock.profile={draft.profiles['specpipe_8x3090']}"
            assert words[-1] == "clock.profile=vllm_8x3090"
    assert banded >= 10
    single = make_draft("law_1b", ITEMS["specpipe/fig11"], lab)
    assert list(drafts(["law_1b"], ITEMS["specpipe/fig11"], lab, Findings())) == [single]


# ---------------------------------------------------------------------- repeats and sets


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


# ---------------------------------------------------------------------- runs


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


def test_a_paced_column_is_added_to_the_result_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = ITEMS["swiftspec/table7"]
    monkeypatch.setattr(running, "perf_counter", iter(range(0, 100, 10)).__next__)
    assert run_item(item, settings(tmp_path)).conditions["seconds"] == 10
    paced = run_item(item, settings(tmp_path), paced=True)
    assert not paced.kept
    assert paced.conditions["seconds"] == 20
    assert paced.conditions["paced"]
    assert run_item(item, settings(tmp_path), paced=True).kept
    assert run_item(item, settings(tmp_path)).kept, "a result with the column has all rows"


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


def test_measured_items_run_first_and_paced_columns_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def note(item: Any, _: Settings, *, paced: bool = False) -> str:
        seen.append((item.alone, paced))
        return item.id

    monkeypatch.setattr(running, "run_item", note)
    list(run_items(list(ITEMS.values()), settings(tmp_path, paced=True)))
    assert seen == sorted(seen, key=lambda pair: (pair[1], not pair[0]))
    assert {True, False} == {alone for alone, _ in seen}
    assert sum(paced for _, paced in seen) == sum("paced" in i.config for i in ITEMS.values())


def test_prose_is_wrapped_between_words() -> None:
    lines = _prose("a  first\nline " + "word " * 40 + "\n\nsecond", bullet="")
    assert lines[-2:] == ["second", ""]
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("a first line word")
    assert _prose("x " * 80, bullet="- ")[1].startswith("  x")


def test_a_draft_of_no_band_leaves_profiles_alone() -> None:
    draft = Draft("d", "D", "d", ("model=synthetic",))
    words = draft.words("clock.profile=specpipe_8x3090")
    assert words == ["model=synthetic", "clock=simulated", "clock.profile=specpipe_8x3090"]
