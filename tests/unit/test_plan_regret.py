"""The figures of ``experiments.plan.regret``: regret, error, shares, and what is run again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from experiments.plan import regret, regret_table

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
