"""The figures of ``experiments.plan.regret``: regret, error, shares, and what is run again."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.plan import regret, regret_table
from specdec.files import write_json

CASES = regret.cases(quick=False)


def result(first: float, best: float, planned: float) -> dict[str, Any]:
    """A case whose first choice and best candidate have these tokens per second."""
    names: list[tuple[str, dict[str, int], float | None, float]] = [
        ("best_first", {"bs": 8}, planned, first),
        ("speculative", {}, None, best),
        ("ar", {}, 50.0, 40.0),
    ]
    return {
        "case": asdict(CASES[0]),
        "candidates": [
            {"strategy": n, "sizes": s, "planned_tokens_per_s": p, "measured_tokens_per_s": m}
            for n, s, p, m in names
        ],
        "provenance": {
            "git": {"revision": "0123456789"},
            "hardware": {"cpu": "some CPU", "cores": 2},
        },
    }


def test_cases_cover_pairs_data_threads_and_batches() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 20
    for pair in regret.PAIRS:
        mine = [case for case in CASES if case.pair == pair]
        assert {(c.data, c.threads) for c in mine} == {(d, t) for d in regret.SETS for t in (1, 2)}
    assert {case.batch for case in CASES} == {1, 4}


@pytest.mark.parametrize("plain_at", [2, 6, 11])
def test_plain_decoding_is_always_tried(plain_at: int) -> None:
    choices: Any = [
        SimpleNamespace(strategy=str(i), sizes={}, tokens_per_s=1.0, is_plain=i == plain_at)
        for i in range(12)
    ]
    names = [name for name, _, _ in regret.tried(choices)]
    assert names[:5] == ["0", "1", "2", "3", "4"]
    assert len(names) == len(set(names)) == 8
    assert str(plain_at) in names
    few = [name for name, _, _ in regret.tried(choices[: plain_at + 1][-3:])]
    assert len(few) == min(3, plain_at + 1)


@pytest.mark.parametrize(
    ("first", "best", "lost"), [(100.0, 90.0, 0.0), (100.0, 100.0, 0.0), (80.0, 100.0, 0.25)]
)
def test_regret_is_time_of_the_first_choice_over_the_best(
    first: float, best: float, lost: float
) -> None:
    assert regret_table.regret(result(first, best, 100.0)) == pytest.approx(lost)


def test_shares_count_cases_within_the_bars() -> None:
    results = [
        result(100.0, 104.9, 109.9),  # both just within
        result(100.0, 105.1, 90.1),
        result(100.0, 100.0, 110.1),
        result(100.0, 100.0, 89.9),
    ]
    assert [round(regret_table.error(r), 3) for r in results] == [0.099, -0.099, 0.101, -0.101]
    told = regret_table.shares(results)
    assert told.startswith("4 cases: regret at most 5 % in 75 % (wanted 90 %)")
    assert ", tokens/s within 10 % in 50 % (wanted 80 %)" in told
    # The planned gain is over 50 tokens/s, the measured one over 40.
    assert [round(regret_table.gain_error(r), 3) for r in results] == [
        -0.121,
        -0.279,
        -0.119,
        -0.281,
    ]
    assert told.endswith("gains over plain decoding within 10 % in 0 %")


def test_the_table_has_a_row_per_case() -> None:
    cases = {"one": result(100.0, 120.0, 95.0), "two": result(50.0, 40.0, 60.0)}
    page = regret_table.table(cases, {}, {}, {})
    assert "| one | best_first bs=8 | 100.0 | 95.0 | -5.0 % | -24.0 % | 20.0 % | - |" in page
    assert "| two | best_first bs=8 | 50.0 | 60.0 | +20.0 % | -4.0 % | 0.0 % | - |" in page
    assert "revision 0123456; some CPU, 2 cores." in page
    assert "same candidate" not in page
    assert "another time" not in page
    page = regret_table.table(cases, {"three": result(100.0, 110.0, 1.0)}, {}, {})
    assert "| three | 40.0 to 110.0 | 10.0 % | 175.0 % |" in page
    assert "3 candidates in groups of eight identical ones: regret at most 5 % in 33 %" in page


def test_a_second_measurement_is_compared_with_the_first() -> None:
    """The gain's change is that of the first choice over that of plain decoding."""
    before, after = result(100.0, 120.0, 95.0), result(110.0, 90.0, 95.0)
    after["candidates"][2]["measured_tokens_per_s"] = 50.0
    found = regret_table.changes(before, after)
    np.testing.assert_allclose(found, (0.1, 0.25, 1.1 / 1.25 - 1.0))
    told = regret_table.again_shares([(before, after), (before, before)])
    assert told.startswith("2 cases measured twice: the first choice within 10 % of itself in 50 %")
    assert told.endswith("plain decoding in 50 %, the gain in 50 %")
    page = regret_table.table({"one": before}, {}, {"one": after}, {})
    assert "| one | 100.0 | 110.0 | +10.0 % | +25.0 % | -12.0 % |" in page


def test_the_difference_between_the_samples_is_taken_out_of_the_gain() -> None:
    """A plan whose prompts have 25 % more tokens per answer promises 25 % more."""
    case = result(100.0, 100.0, 125.0)
    case["candidates"][2]["planned_tokens_per_s"] = 40.0  # as measured
    found = {"planned": [300, 100], "run": [240, 100]}
    assert regret_table.sample_ratio(found) == pytest.approx(1.25)
    assert regret_table.gain_error(case) == pytest.approx(0.25)
    assert regret_table.gain_error_of_speed(case, found) == pytest.approx(0.0)
    told = regret_table.samples_shares([(case, found)])
    assert "+25.0 % tokens per answer on the plan's prompts" in told
    assert told.endswith(
        "+25.0 % off on average and within 10 % in 0 %, without that difference +0.0 % and 100 %"
    )
    page = regret_table.table({"one": case}, {}, {}, {"one": found})
    assert "| one | 3.00 | 2.40 | +25.0 % | +25.0 % | +0.0 % |" in page


def test_second_measurements_decode_further_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same candidates and, of 24 + 2 x 18 prompts, the last 18; only of stored cases."""
    case, ran = CASES[0], []
    before = result(100.0, 100.0, 99.0)
    for candidate in before["candidates"]:
        candidate["turns"] = [(1.0, 100)] * 18
    write_json(tmp_path / regret.RESULT, {"cases": {case.name: before}})

    def measured(words: Any, choices: Any, count: int, batch: int) -> list[list[tuple[float, int]]]:
        ran.append((words, choices, count))
        return [[(1.0, 90)] for _ in choices]

    monkeypatch.setattr(regret, "_measured", measured)
    monkeypatch.setattr(regret.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["regret", str(tmp_path), "--again"])
    regret.main()
    ((words, choices, count),) = ran
    assert f"data.limit={24 + 18 + 18}" in words
    assert count == 18
    assert [(name, planned) for name, _, planned in choices] == [
        (c["strategy"], c["planned_tokens_per_s"]) for c in before["candidates"]
    ]
    told = f"{case.name}: first choice -10.0 %, plain decoding +125.0 %, gain -60.0 %"
    assert told in capsys.readouterr().out
    regret.main()
    assert len(ran) == 1


def _with_turns(speeds: list[float], noise: float, seed: int) -> dict[str, Any]:
    """Candidates of these tokens per second in 18 turns of 64 tokens, with relative noise."""
    rng = np.random.default_rng(seed)
    seconds = (
        64.0 / np.array(speeds)[:, None] * np.exp(noise * rng.standard_normal((len(speeds), 18)))
    )
    turns = [[(float(s), 64) for s in of] for of in seconds]
    return {"candidates": [{"turns": t} for t in turns]}


def test_a_regret_beyond_doubt() -> None:
    """Identical candidates have one in at most 5 % of cases, a slow first choice always."""
    found = [regret_table.least_regret(_with_turns([100.0] * 8, 0.1, seed)) for seed in range(60)]
    # At a rate of 5 % more than 9 of 60 occur with a probability of 1e-3.
    assert sum(least > 0.0 for least in found if least is not None) <= 9
    slow = regret_table.least_regret(_with_turns([100.0, *[100.0] * 6, 130.0], 0.1, 0))
    assert slow is not None
    assert 0.1 < slow < 0.3
    assert regret_table.least_regret(result(1.0, 2.0, 3.0)) is None


def test_the_control_runs_one_candidate_eight_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def measured(words: Any, choices: Any, count: int, batch: int) -> list[list[tuple[float, int]]]:
        ran.append(choices)
        return [[(1.0, 10 + i)] for i in range(len(choices))]

    monkeypatch.setattr(regret, "_measured", measured)
    monkeypatch.setattr(regret.torch, "set_num_threads", lambda _: None)
    words = ["regret", str(tmp_path), "--control", "--only", CASES[0].name]
    monkeypatch.setattr(sys, "argv", words)
    regret.main()
    assert ran == [[(regret.CONTROL, {}, None)] * 8]
    stored = json.loads((tmp_path / regret.RESULT).read_text(encoding="utf-8"))
    assert regret_table.regrets(stored["control"][CASES[0].name])[0] == pytest.approx(0.7)


def test_stored_cases_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case that is missing is run and stored at once; the others are read."""
    stored, missing = CASES[0].name, CASES[1].name
    write_json(tmp_path / regret.RESULT, {"cases": {stored: result(100.0, 100.0, 99.0)}})
    ran = []

    def run_case(case: regret.Case, folder: Path, quick: bool) -> dict[str, Any]:
        ran.append(case.name)
        return result(60.0, 90.0, 60.0)

    monkeypatch.setattr(regret, "run_case", run_case)
    words = ["regret", str(tmp_path), "--only", stored, missing]
    for expected in ([missing], [missing]):
        monkeypatch.setattr(sys, "argv", words)
        regret.main()
        assert ran == expected
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{stored}: best_first 100.0 tokens/s, planned 99.0 (-1.0 %; gain")
    assert printed[1].endswith("regret 50.0 %")
    assert printed[2].startswith("2 cases: regret at most 5 % in 50 %")
